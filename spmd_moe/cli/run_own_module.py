"""The checks of a module of one's own: types, values, gradients, and its reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placements import Mesh, assert_type, set_current_mesh, split, type_of
from placements.ledger import Entry
from placements.mesh import as_mesh
from placements.state import suspended
from placements.testing.adjoint import check_adjoint
from placements.testing.ranks import device_mesh, run_ranks
from placements.testing.spmd_case import check_spmd_case
from placements.torch_private import unseen
from placements.types import AxisType
from placements.verify import verify
from spmd_moe.cli.crossings import Crossing, Recorder, checked, ledger_of
from spmd_moe.cli.own_module import OwnModule


@dataclass(frozen=True)
class Checked:
    """What crossed and what was sent on a mesh of sizes, and the types of the results."""

    crossings: list[Crossing]
    collectives: list[Entry]
    outs: list[dict[str, AxisType]]


def check_types(own: OwnModule) -> Checked:
    """PlacementError if the module does not type-check on the mesh."""
    recorder, mesh = Recorder(), Mesh(own.mesh)
    with set_current_mesh(mesh), ledger_of(recorder):
        with checked(recorder):
            results = _tensors(own.call(**_declared(own, mesh, 0)))
        types = [type_of(y) for y in results]
        _backward(results)
    outs = [dict(t) if t is not None else {} for t in types]
    return Checked(recorder.crossings, recorder.collectives, outs)


def check_values(own: OwnModule) -> None:
    """RankFailure if values on simulated ranks are not what their types say."""
    run_ranks(own.mesh, _verified, own)


def check_gradients(own: OwnModule, outs: Sequence[dict[str, AxisType]]) -> None:
    """AssertionError, naming the input, if its gradient is not the adjoint."""
    names = list(own.placed)

    def call(*values: Tensor) -> Any:
        return own.call(**dict(zip(names, values, strict=True)))

    check_adjoint(call, own.placed, list(outs), mesh=own.mesh)


def check_reference(own: OwnModule) -> None:
    """AssertionError if results or gradients differ from those of the reference."""
    assert own.reference is not None
    if not check_spmd_case(own.call, own.reference, own.placed, mesh=own.mesh):
        raise AssertionError("on simulated ranks the checker refuses it")


def _verified(own: OwnModule) -> None:
    mesh = as_mesh(device_mesh())
    with set_current_mesh(mesh), verify():
        results = _tensors(own.call(**_declared(own, mesh, dist.get_rank())))
        with unseen(), suspended():
            _backward(results)


def _declared(own: OwnModule, mesh: Mesh, rank: int) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    for name, (value, types) in own.placed.items():
        with unseen():
            local = split(value, types, mesh.seen_from({}))[rank].requires_grad_()
        held[name] = assert_type(local, types)
    return held


def _backward(results: Sequence[Tensor]) -> None:
    """From ones: a gradient of any type that a result can have."""
    wanted = [y for y in results if y.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(y) for y in wanted])


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)
