"""Calls of DTensors inside a block are told the call that they stand for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from placements import (
    Mesh,
    PlacementError,
    R,
    S,
    assert_type,
    declare,
    set_current_mesh,
    typecheck,
)
from placements.interop.fake_world import device_mesh_of, fake_world

WHERE_USED = "where ranks go on differently with it, convert(x, 'tp', src=I, dst=R)"


# The call, what users call it, and what to write instead.
CALLS: dict[str, tuple[Callable[[Any, Any, Any, Any], Any], str]] = {
    "DTensor.from_local": (
        lambda x, d, w, mesh: DTensor.from_local(x, mesh, [Cut(0)]),
        "assert_type(x, {'tp': S(0)}), where x is the local tensor",
    ),
    "DTensor.to_local": (
        lambda x, d, w, mesh: d.to_local(),
        "assert_type(x, {'tp': S(0)}), where x is the local tensor",
    ),
    "DTensor.from_local of a copy": (
        lambda x, d, w, mesh: DTensor.from_local(x, mesh, [Replicate()]),
        f"assert_type(x, {{'tp': I}}), where x is the local tensor; {WHERE_USED}",
    ),
    "DTensor.from_local with summands for gradients": (
        lambda x, d, w, mesh: DTensor.from_local(
            x, mesh, [Replicate()], grad_placements=[Partial()]
        ),
        "assert_type(x, {'tp': R}), where x is the local tensor",
    ),
    "DTensor.to_local of a copy": (
        lambda x, d, w, mesh: w.to_local(),
        f"assert_type(x, {{'tp': I}}), where x is the local tensor; {WHERE_USED}",
    ),
    "DTensor.to_local with summands for gradients": (
        lambda x, d, w, mesh: w.to_local(grad_placements=[Partial()]),
        "convert(x, 'tp', src=I, dst=R), where x is the local tensor",
    ),
    "DTensor.redistribute": (
        lambda x, d, w, mesh: d.redistribute(mesh, [Replicate()]),
        "redistribute(x, 'tp', src=S(0), dst=R), where x is the local tensor",
    ),
    "DTensor.full_tensor": (
        lambda x, d, w, mesh: d.full_tensor(),
        "redistribute(x, 'tp', src=S(0), dst=I), where x is the local tensor",
    ),
    "DTensor.full_tensor with summands for gradients": (
        lambda x, d, w, mesh: d.full_tensor(grad_placements=[Partial()]),
        "redistribute(x, 'tp', src=S(0), dst=R), where x is the local tensor",
    ),
    "distribute_tensor": (
        lambda x, d, w, mesh: distribute_tensor(x, mesh, [Cut(0)]),
        "convert(x, 'tp', src=R, dst=S(0)), where x is the whole tensor",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_told_what_it_stands_for(name: str) -> None:
    call, instead = CALLS[name]
    with fake_world():
        mesh = device_mesh_of(Mesh({"tp": 2}))
        d = DTensor.from_local(torch.ones(2, 3), mesh, [Cut(0)])
        w = DTensor.from_local(torch.ones(2, 3), mesh, [Replicate()])
        with set_current_mesh(mesh), typecheck():
            x = assert_type(torch.ones(2, 3), {"tp": S(0)})
            with pytest.raises(PlacementError) as caught:
                call(x, d, w, mesh)
    assert caught.value.advice == instead
    called, _, _ = name.partition(" ")
    assert str(caught.value).startswith(f"{called} at test_dtensors.py:")


class Norm(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        w = torch.ones(3)
        self.weight = nn.Parameter(distribute_tensor(w, mesh, [Replicate()]))


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_parameter_that_is_a_dtensor_is_called_one(is_declared: bool) -> None:
    with fake_world():
        mesh = device_mesh_of(Mesh({"tp": 2}))
        self = Norm(mesh)
        with set_current_mesh(mesh), typecheck():
            if is_declared:
                declare(self, {"weight": {"tp": R}})
            x = assert_type(torch.ones(2, 3), {"tp": S(0)})
            with pytest.raises(PlacementError, match="weight is a DTensor") as caught:
                x * self.weight
    assert "hold_pieces(self, {'weight': {'tp': R}})" in caught.value.advice
