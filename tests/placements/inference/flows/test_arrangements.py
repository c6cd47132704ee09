"""Tensors in each other's shape, products of blocks, turned and flattened tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    Even,
    Folded,
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)


def types_of(results: Any) -> list[Any]:
    return [type_of(one) for one in results]


def test_tensors_that_are_broadcast_together_are_cut_alike() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        bias = assert_type(torch.randn(3), {"a": R})
        p = assert_type(torch.randn(1, 3), {"a": P})
        assert types_of(torch.broadcast_tensors(x, bias)) == [{"a": S(0)}] * 2
        assert types_of(torch.broadcast_tensors(bias, p)) == [{"a": R}, {"a": P}]
        own = assert_type(torch.randn(2, 3), {"a": V})
        assert types_of(torch.broadcast_tensors(own, bias)) == [{"a": V}] * 2
        whole = assert_type(torch.randn(2, 3), {"a": R})
        with pytest.raises(PlacementError):
            torch.broadcast_tensors(x, whole)  # one device has 4 rows of x


@pytest.mark.parametrize(("way", "dim"), [("ij", 0), ("xy", 1)])
def test_a_grid_is_cut_where_its_tensor_stands(way: str, dim: int) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2), {"a": S(0)})
        y = assert_type(torch.randn(3), {"a": R})
        assert types_of(torch.meshgrid(x, y, indexing=way)) == [{"a": S(dim)}] * 2
        with pytest.raises(PlacementError):
            torch.meshgrid(x, x, indexing=way)


def test_a_product_of_blocks_is_cut_in_rows_or_in_blocks() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        r = assert_type(torch.randn(5, 1), {"a": R})
        assert type_of(torch.kron(x, r)) == {"a": S(0, Even(20))}
        assert type_of(torch.kron(r, x)) == {"a": S(0, Folded(5, Even(4)))}
        with pytest.raises(PlacementError):
            torch.kron(x, x)


TURNS: dict[int, tuple[int | None, int | None]] = {
    0: (0, 1), 1: (1, None), 2: (None, None), 3: (None, 0), 4: (0, 1), -1: (None, 0)
}  # fmt: skip


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_turn_keeps_the_dim_that_is_not_turned_around(turns: int, dim: int) -> None:
    becomes = TURNS[turns][dim]
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 4), {"a": S(dim)})
        if becomes is None:
            with pytest.raises(PlacementError, match="change places"):
                torch.rot90(x, turns)
        else:
            assert type_of(torch.rot90(x, turns)) == {"a": S(becomes)}


LINES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "take of a piece": lambda x, r, p: x.take(torch.tensor([0, 1])),
    "a diagonal of a piece": lambda x, r, p: x.fill_diagonal_(0.0),
    "a diagonal of a sum": lambda x, r, p: p.fill_diagonal_(1.0),
}


@pytest.mark.parametrize("name", LINES)
def test_places_in_the_whole_are_not_those_of_a_piece(name: str) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        r = assert_type(torch.randn(3, 3), {"a": R})
        p = assert_type(torch.randn(3, 3), {"a": P})
        with pytest.raises(PlacementError):
            LINES[name](x, r, p)
        assert type_of(r.take(torch.tensor([0, 1]))) == {"a": R}
        assert type_of(r.fill_diagonal_(2.0)) == {"a": R}
        assert type_of(p.fill_diagonal_(0.0)) == {"a": P}


def test_the_conjugate_is_cut_as_the_numbers_are() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        c = assert_type(torch.randn(2, dtype=torch.complex64), {"a": S(0)})
        assert type_of(c.conj()) == type_of(torch.conj(c)) == {"a": S(0)}
        p = assert_type(torch.randn(2, dtype=torch.complex64), {"a": P})
        assert type_of(p.conj()) == {"a": P}
