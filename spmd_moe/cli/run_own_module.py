"""The checks of a module of one's own: types, values, gradients, and its reference."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from placements import Mesh, set_current_mesh, split, type_of
from placements._torch import unseen
from placements.runtime import tags
from placements.runtime.declared import declared
from placements.runtime.ledger import Entry
from placements.runtime.state import suspended
from placements.testing.compare.adjoint import check_adjoint
from placements.testing.compare.case import check_spmd_case
from placements.testing.ranks.run import device_mesh, run_ranks
from placements.types.axis import AxisType
from placements.types.mesh import as_mesh
from placements.verification.mode import verify
from spmd_moe.cli.crossings import Crossing, Recorder, checked, ledger_of
from spmd_moe.cli.own_module import OwnModule
from spmd_moe.cli.terminal import BadInput


@dataclass(frozen=True)
class Checked:
    """What crossed and what was sent on a mesh of sizes, and the types of the results."""

    crossings: list[Crossing]
    collectives: list[Entry]
    outs: list[dict[str, AxisType]]
    smooth: list[int]  # which results have a gradient


def check_types(own: OwnModule) -> Checked:
    """PlacementError if the module does not type-check on the mesh."""
    recorder, mesh = Recorder(), Mesh(own.mesh)
    with set_current_mesh(mesh), ledger_of(recorder):
        with checked(recorder):
            results = own.call(**_declared(own, mesh, 0))
        if not results:
            raise BadInput(f"--module {own.name}: forward returns no tensor to check")
        types = [type_of(y) for y in results]
        _backward(results)
    outs = [dict(t) if t is not None else {} for t in types]
    smooth = [k for k, y in enumerate(results) if y.requires_grad]
    return Checked(recorder.crossings, recorder.collectives, outs, smooth)


def run_plainly(own: OwnModule) -> None:
    """The module on simulated ranks without the checker: does it raise by itself?"""
    run_ranks(own.mesh, _unchecked, own)


def _unchecked(own: OwnModule) -> None:
    mesh = as_mesh(device_mesh())
    with set_current_mesh(mesh):
        held = {
            name: split(value, types, mesh.seen_from({}))[dist.get_rank()]
            for name, (value, types) in own.placed.items()
        }
        for local in held.values():
            local.requires_grad_(local.is_floating_point())
        _backward(own.call(**held))


def check_values(own: OwnModule, found: Checked) -> None:
    """RankFailure if values on simulated ranks are not what their types say."""
    run_ranks(own.mesh, _verified, own)


def check_gradients(own: OwnModule, found: Checked) -> None:
    """AssertionError, naming the input, if its gradient is not the adjoint."""
    moved = {n: placed for n, placed in own.placed.items() if placed[0].is_floating_point()}
    mesh = Mesh(own.mesh)
    still = {
        name: split(value, types, mesh)
        for name, (value, types) in own.placed.items()
        if name not in moved
    }

    def call(*values: Tensor) -> list[Tensor]:
        held = {name: parts[dist.get_rank()] for name, parts in still.items()}
        results = own.call(**dict(zip(moved, values, strict=True)), **held)
        return [results[k] for k in found.smooth]

    check_adjoint(call, moved, [found.outs[k] for k in found.smooth], mesh=own.mesh)


def check_reference(own: OwnModule, found: Checked) -> None:
    """AssertionError if results or gradients differ from those of the reference."""
    assert own.reference is not None
    try:
        accepted = check_spmd_case(own.call, own.reference, own.placed, mesh=own.mesh)
    except AssertionError as error:
        # The largest difference and its place say enough; whole tensors follow them.
        raise AssertionError(str(error).partition("\non ranks ")[0]) from None
    if not accepted:
        raise AssertionError("on simulated ranks the checker refuses it")


def _verified(own: OwnModule) -> None:
    mesh = as_mesh(device_mesh())
    with set_current_mesh(mesh), verify():
        results = own.call(**_declared(own, mesh, dist.get_rank()))
        with unseen(), suspended():
            _backward(results)


def _declared(own: OwnModule, mesh: Mesh, rank: int) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    for name, (value, types) in own.placed.items():
        with unseen():
            local = split(value, types, mesh.seen_from({}))[rank]
            local.requires_grad_(local.is_floating_point())
            # Not by `assert_type`, which would be a crossing of this file's.
            tags.put(local, declared(mesh, types, tuple(local.shape)))
        held[name] = local
    return held


def _backward(results: Sequence[Tensor]) -> None:
    """From ones: a gradient of any type that a result can have."""
    wanted = [y for y in results if y.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(y) for y in wanted])
