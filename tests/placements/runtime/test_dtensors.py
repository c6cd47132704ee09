"""Calls of DTensors inside a block are told the call that they stand for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut

from placements import Mesh, PlacementError, S, assert_type, set_current_mesh, typecheck
from placements.interop.fake_world import device_mesh_of, fake_world

# The call, what users call it, and what to write instead.
CALLS: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "DTensor.from_local": (
        lambda x, d, mesh: DTensor.from_local(x, mesh, [Cut(0)]),
        "assert_type(x, {'tp': S(0)}), where x is the local tensor",
    ),
    "DTensor.to_local": (
        lambda x, d, mesh: d.to_local(),
        "assert_type(x, {'tp': S(0)}), where x is the local tensor",
    ),
    "DTensor.redistribute": (
        lambda x, d, mesh: d.redistribute(mesh, [Replicate()]),
        "redistribute(x, 'tp', src=S(0), dst=R), where x is the local tensor",
    ),
    "DTensor.full_tensor": (
        lambda x, d, mesh: d.full_tensor(),
        "redistribute(x, 'tp', src=S(0), dst=R), where x is the local tensor",
    ),
    "distribute_tensor": (
        lambda x, d, mesh: distribute_tensor(x, mesh, [Cut(0)]),
        "convert(x, 'tp', src=R, dst=S(0)), where x is the whole tensor",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_told_what_it_stands_for(name: str) -> None:
    call, instead = CALLS[name]
    with fake_world():
        mesh = device_mesh_of(Mesh({"tp": 2}))
        d = DTensor.from_local(torch.ones(2, 3), mesh, [Cut(0)])
        with set_current_mesh(mesh), typecheck():
            x = assert_type(torch.ones(2, 3), {"tp": S(0)})
            with pytest.raises(PlacementError) as caught:
                call(x, d, mesh)
    assert caught.value.advice == instead
    assert str(caught.value).startswith(f"{name} at test_dtensors.py:")
