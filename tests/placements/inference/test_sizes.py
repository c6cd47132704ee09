"""Sizes of pieces as sizes of new tensors: of several cuts, and of another mesh."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    axis_rank,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.types.axis import AxisType

Line = Callable[[Tensor, Tensor, Any], Tensor]
MADE: dict[str, Line] = {
    "ones": lambda x, z, n: torch.ones(x.shape[0]),
    "new_ones": lambda x, z, n: x.new_ones(x.shape),
    "expand_as": lambda x, z, n: torch.ones(3).expand_as(x).sum(0),
    "expand": lambda x, z, n: z.expand(x.shape[0], 4).sum(0),
    "rank": lambda x, z, n: torch.ones(n + 1).sum(),
    "cat": lambda x, z, n: torch.cat([z, torch.ones(x.shape[0])]),
}
# What is like a tensor lives on the mesh of that tensor, as its clone does.
LIKE: dict[str, tuple[Line, AxisType]] = {
    "ones_like": (lambda x, z, n: torch.ones_like(x).sum(0), P),
    "full_like": (lambda x, z, n: torch.full_like(x, 2.0), S(0)),
    "empty_like": (lambda x, z, n: torch.empty_like(x).fill_(1.0), S(0)),
}
VIEWED: dict[str, Line] = {
    "view": lambda x, z, n: z.view(x.shape[0], -1),
    "view, last": lambda x, z, n: z.view(-1, x.shape[0]).sum(1),
    "unflatten": lambda x, z, n: z.unflatten(0, (x.shape[0], -1)),
    "of a constant": lambda x, z, n: torch.ones(4).view(x.shape[0], -1),
}


def run(line: Line) -> Tensor:
    """x is cut over dp on the dense mesh; the line runs on the sparse mesh, z is whole."""
    with set_current_mesh({"dp": 2, "tp": 2}):
        x = assert_type(torch.randn(2, 3), {"dp": S(0), "tp": R})
        rank = axis_rank("dp")
        with set_current_mesh({"edp": 2, "ep": 2}):
            z = assert_type(torch.arange(4.0), {"edp": R, "ep": R})
            return line(x, z, rank)


@pytest.mark.parametrize("name", MADE)
def test_what_is_sized_on_another_mesh_may_differ_on_every_axis(name: str) -> None:
    with typecheck():
        assert type_of(run(MADE[name])) == {"edp": V, "ep": V}


@pytest.mark.parametrize("name", LIKE)
def test_what_is_like_a_tensor_lives_on_its_mesh(name: str) -> None:
    line, on_dp = LIKE[name]
    with typecheck():
        assert type_of(run(line)) == {"dp": on_dp, "tp": R}


@pytest.mark.parametrize("name", VIEWED)
def test_a_view_to_a_size_of_another_mesh_is_refused(name: str) -> None:
    with typecheck(), pytest.raises(PlacementError, match="read on another mesh"):
        run(VIEWED[name])


# Lines whose sizes are each rank's own on a, where a is the inner cut of x over b and a.
OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "zeros": lambda x, v: torch.zeros(v.shape[0], x.shape[0]),
    "the other way around": lambda x, v: torch.zeros(x.shape[0], v.shape[0]),
    "numel": lambda x, v: torch.ones(v.numel(), x.shape[0]),
    "a sum": lambda x, v: torch.full((v.shape[0] + 1, x.shape[0]), 2.0),
    "empty": lambda x, v: torch.empty(v.shape[0], x.shape[0]).fill_(1.0),
    "expand": lambda x, v: torch.ones(()).expand(v.shape[0], x.shape[0]),
}


@pytest.mark.parametrize("name", OWN)
def test_a_size_that_forgets_an_inner_cut_forgets_the_outer_ones(name: str) -> None:
    """The outer pieces are made of the inner ones."""
    with set_current_mesh({"a": 2, "b": 2}), typecheck():
        v = assert_type(torch.randn(2, 3), {"a": V, "b": R})
        x = assert_type(torch.randn(2, 1), {"b": S(0), "a": S(0)})
        assert type_of(OWN[name](x, v)) == {"a": V, "b": V}


def test_a_size_that_forgets_an_outer_cut_keeps_the_inner_one() -> None:
    with set_current_mesh({"a": 2, "b": 2}), typecheck():
        v = assert_type(torch.randn(2, 3), {"a": V, "b": R})
        x = assert_type(torch.randn(2, 1), {"a": S(0), "b": S(0)})
        assert type_of(torch.zeros(v.shape[0], x.shape[0])) == {"a": V, "b": S(1)}
