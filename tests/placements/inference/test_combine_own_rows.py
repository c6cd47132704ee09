"""Numbers of each rank's own rows are pieces as an index of those rows, and no numbers.

`torch.arange(x.shape[0])` of a cut dim counts from 0 on every rank. Whatever takes such
numbers for numbers makes them Varying, or is refused.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that users give it
from torch import Tensor

from placements import (
    PlacementError,
    R,
    S,
    V,
    all_gather,
    all_to_all,
    assert_type,
    redistribute,
    set_current_mesh,
    type_of,
    typecheck,
)


@pytest.fixture
def x() -> Iterator[Tensor]:
    with set_current_mesh({"a": 2}), typecheck():
        yield assert_type(torch.ones(2, 4, dtype=torch.float64), {"a": S(0)})


def own(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def grid(x: Tensor) -> Tensor:
    return own(x)[:, None].expand(-1, 4)


CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "negated": lambda j: -j, "neg()": lambda j: j.neg(), "padded": lambda j: F.pad(j, (1, 1)),
    "a triangle": lambda j: j.tril(), "on a diagonal": lambda j: torch.diag_embed(j),
    "summed up": lambda j: j.cumsum(1), "as bools": lambda j: j.bool(),
    "as small numbers": lambda j: j.to(torch.int8), "rounded": lambda j: j.half(),
    "a spectrum": lambda j: torch.fft.fft(j).real, "gated": lambda j: F.glu(j.double()),
    "filled": lambda j: j.index_fill(1, torch.tensor([0]), 0),
    "put": lambda j: j.index_put((torch.tensor([0]),), torch.tensor(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_computed_from_them_is_varying_or_refused(name: str, x: Tensor) -> None:
    try:
        found = type_of(CHANGED[name](grid(x)))
    except PlacementError:
        return
    assert found == {"a": V}


def test_the_same_numbers_in_other_places_still_count_rows(x: Tensor) -> None:
    j = own(x)
    for same in (j, j.clone(), j.long(), j.int(), grid(x)[:, 0], +j):
        assert type_of(x[same]) == {"a": S(0)}
    assert type_of(grid(x).flip(1)) == type_of(grid(x).roll(1, 1)) == {"a": S(0)}


WRITTEN: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all": lambda j, ids: j.__setitem__(slice(None), 0),
    "by others": lambda j, ids: j.__setitem__(slice(None), ids),
    "in place": lambda j, ids: j.neg_(), "copied over": lambda j, ids: j.copy_(ids),
    "over others": lambda j, ids: ids.copy_(j), "by out=": lambda j, ids: torch.neg(j, out=j),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_write_over_them_is_refused_or_forgets_them(name: str, x: Tensor) -> None:
    j, ids = own(x), assert_type(torch.tensor([1, 0]), {"a": S(0)})
    try:
        WRITTEN[name](j, ids)
    except PlacementError:
        return
    for after in (j, ids):
        if type_of(after) == {"a": S(0)}:
            with pytest.raises(PlacementError):
                x[after]


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda j: all_gather(j, "a", src=S(0), dst=R),
    "redistribute": lambda j: redistribute(j, "a", src=S(0), dst=R),
    "all_to_all": lambda j: all_to_all(j, "a", src=S(0), dst=S(1)),
}


@pytest.mark.parametrize("name", MOVED)
def test_they_count_nothing_on_another_rank(name: str, x: Tensor) -> None:
    with pytest.raises(PlacementError, match="to_global"):
        MOVED[name](grid(x))


def test_they_are_no_gradient_of_a_piece(x: Tensor) -> None:
    w = assert_type(torch.ones(4, dtype=torch.float64, requires_grad=True), {"a": R})
    seed = grid(x).double()
    with pytest.raises(PlacementError, match="expected S"):
        torch.autograd.grad(x * w, [w], seed)
    y = x * w
    y.register_hook(lambda g: seed)
    with pytest.raises(PlacementError, match="the gradient that it returns is V"):
        y.sum().backward()
