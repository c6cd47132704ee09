"""Constants have types, too: an annotation is checked against the type of a constant."""

from typing import Annotated

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from placements import (
    I,
    On,
    P,
    PlacementError,
    R,
    S,
    assert_type,
    set_current_mesh,
    typecheck,
    typed,
)

Row = Float[Tensor, " n"]


@typed
def replicate(x: Annotated[Row, On(a=R)]) -> None: ...
@typed
def invariant(x: Annotated[Row, On(a=I)]) -> None: ...
@typed
def partial(x: Annotated[Row, On(a=P)]) -> None: ...
@typed
def piece(x: Annotated[Row, On(a=S(0))]) -> None: ...
@typed
def alike(x: Annotated[Row, On(a="t")], y: Annotated[Row, On(a="t")]) -> None: ...


def test_a_constant_of_plain_sizes_is_replicate_and_invariant_and_zeros_are_summands() -> (
    None
):
    with set_current_mesh({"a": 2}), typecheck():
        for constant in (torch.ones(2), torch.zeros(2)):
            replicate(constant)
            invariant(constant)
            with pytest.raises(
                PlacementError, match=r"x is R on axis 'a', expected S\(0\)"
            ):
                piece(constant)
        partial(torch.zeros(2))
        with pytest.raises(PlacementError, match="x is R on axis 'a', expected P"):
            partial(torch.ones(2))


def test_a_constant_of_a_pieces_size_is_a_piece() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2), {"a": S(0)})
        piece(torch.ones_like(x))
        for other in (replicate, invariant, partial):
            with pytest.raises(PlacementError, match=r"x is S\(0\) on axis 'a', expected"):
                other(torch.ones_like(x))


def test_a_constant_leaves_a_variable_open_only_where_it_fits() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2), {"a": I})
        alike(torch.ones(2), x)
        alike(torch.ones_like(assert_type(torch.randn(2), {"a": S(0)})), torch.zeros_like(
            assert_type(torch.randn(2), {"a": S(0)})
        ))  # fmt: skip
        with pytest.raises(PlacementError, match="y is I on axis 'a', expected"):
            alike(torch.ones_like(assert_type(torch.randn(2), {"a": S(0)})), x)
        p = assert_type(torch.randn(2), {"a": P})
        alike(p, torch.zeros(2))
        alike(torch.zeros(2), p)
        for pair in ((p, torch.ones(2)), (torch.ones(2), p)):
            with pytest.raises(PlacementError, match="is R on axis 'a', expected P"):
                alike(*pair)
