"""Check a module of the user's: its types, values, gradients, and its reference."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from placements import (
    AxisType,
    Mesh,
    PlacementError,
    as_mesh,
    set_current_mesh,
    split,
    type_of,
    unchecked,
    verify,
)
from placements.runtime import tags
from placements.runtime.declared import declared
from placements.runtime.ledger import Entry
from placements.runtime.state import suspended
from placements.testing import (
    RankFailure,
    check_adjoint,
    check_spmd_case,
    device_mesh,
    run_ranks,
)
from placements.testing.compare.case import OF_REFERENCE
from placements.testing.ranks.crashes import CheckerCrash, check_judged
from spmd_moe.checks.crossings import Crossing, Recorder, checked, ledger_of
from spmd_moe.checks.errors import BadInput
from spmd_moe.checks.module.inputs import OwnModule
from spmd_moe.checks.module.user_code import blamed

# What a check raises if the module fails it, or if the checker itself does.
FAILURES = (PlacementError, RankFailure, AssertionError, CheckerCrash)


@dataclass(frozen=True)
class Checked:
    """What crossed and what was sent on a mesh of sizes, and the types of the results."""

    crossings: list[Crossing]
    collectives: list[Entry]
    outs: list[dict[str, AxisType]]
    smooth: list[int]  # which results have a gradient


@dataclass
class Outcome:
    """What the types said, and the names of the checks that passed."""

    types: Checked | None = None
    passed: list[str] = field(default_factory=list[str])


def checks_of(own: OwnModule) -> list[str]:
    """Return the names of the checks that can be made of a module, in order."""
    return ["types", *(n for n in CHECKS if n != "reference" or own.reference is not None)]


def check_module(own: OwnModule, names: Iterable[str], outcome: Outcome) -> None:
    """Make the checks `names`, write what they find to `outcome`, and stop at a failure.

    Raises one of FAILURES, or BadInput if the module itself cannot be run.
    """
    for name in names:
        if name == "gradients" and outcome.types and not outcome.types.smooth:
            continue  # the results are integers: they have no gradients
        if outcome.types is None:
            with blamed(own.name, own.cls, PlacementError, CheckerCrash), _judged(own):
                outcome.types = check_types(own)
        else:
            with blamed(own.name, own.cls, *FAILURES), _judged(own, AssertionError):
                CHECKS[name](own, outcome.types)
        outcome.passed.append(name)


@contextmanager
def _judged(own: OwnModule, *promised: type[Exception]) -> Generator[None]:
    """Raise CheckerCrash for what no check promises and the module alone does not raise."""
    try:
        yield
    except (BadInput, *promised):
        raise
    except Exception as error:
        if OF_REFERENCE not in getattr(error, "__notes__", ()):
            check_judged(error, lambda: run_plainly(own))
        raise


def check_types(own: OwnModule) -> Checked:
    """Raise PlacementError if the module does not type-check on the mesh."""
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
    return Checked(recorder.traced(), recorder.collectives, outs, smooth)


def run_plainly(own: OwnModule) -> None:
    """Run the module on simulated ranks without the checker: does it raise by itself?"""
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
    """Raise RankFailure if values on simulated ranks are not what their types say."""
    run_ranks(own.mesh, _verified, own)


def check_gradients(own: OwnModule, found: Checked) -> None:
    """Raise AssertionError, which names the input, if its gradient is not the adjoint."""
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
    """Raise AssertionError if results or gradients are not those of the reference."""
    assert own.reference is not None
    try:
        accepted = check_spmd_case(own.call, own.reference, own.placed, mesh=own.mesh)
    except AssertionError as error:
        # The largest difference and its place say enough; whole tensors follow them.
        raise AssertionError(str(error).partition("\non ranks ")[0]) from None
    if not accepted:
        raise AssertionError("on simulated ranks the checker refuses it")


# After the types: the name of each check, and what makes it.
CHECKS: dict[str, Callable[[OwnModule, Checked], None]] = {
    "values": check_values,
    "gradients": check_gradients,
    "reference": check_reference,
}


def _verified(own: OwnModule) -> None:
    mesh = as_mesh(device_mesh())
    with set_current_mesh(mesh), verify():
        results = own.call(**_declared(own, mesh, dist.get_rank()))
        with unchecked(), suspended():
            _backward(results)


def _declared(own: OwnModule, mesh: Mesh, rank: int) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    for name, (value, types) in own.placed.items():
        with unchecked():
            local = split(value, types, mesh.seen_from({}))[rank]
            local.requires_grad_(local.is_floating_point())
            # Not by `assert_type`, which would be a crossing of this file's.
            tags.put(local, declared(mesh, types, tuple(local.shape)))
        held[name] = local
    return held


def _backward(results: Sequence[Tensor]) -> None:
    """Run backward from ones: a gradient of any type that a result can have."""
    wanted = [y for y in results if y.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(y) for y in wanted])
