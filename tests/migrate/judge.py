"""Run a program of the guide on simulated ranks, and ask every checker about it.

A program gets what this rank holds of the inputs, as plain tensors that want gradients.
Results and the gradients of the inputs are joined as `one_device.py` says and compared with
one device exactly: all numbers are whole and small, in float64.
"""

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from placements import (
    Mesh,
    PlacementError,
    assert_type,
    dual,
    join,
    set_current_mesh,
    split,
    typecheck,
    verify,
)
from placements._torch import explicit_redistribution
from placements.interop.engines import first_line
from placements.interop.fake_world import on_mesh, quiet, silent_torch
from placements.interop.spmd_types import SpmdTypes
from placements.testing import RankFailure, check_adjoint, device_mesh, run_ranks
from placements.testing.ranks.crashes import cause_of
from placements.types.text import as_axis_type
from tests.migrate.patterns import BEFORE, OURS, PEER, Pattern
from tests.migrate.patterns import pattern as load

Program = Callable[..., Any]
# One rank: results, and the gradients of inputs by name.
Found = tuple[list[Tensor], dict[str, Tensor]]

PLAIN, TYPES, VERIFY = "plain", "typecheck()", "verify()"
# A program for spmd_types of which only the import is changed, under our checker.
BY_IMPORT = "typecheck() by a change of import"
FORWARD, ADJOINT = "comparison of the forward", "check_adjoint"
LOCAL, GLOBAL, DTENSOR = "spmd_types local", "spmd_types global", "DTensor"
# Which words a checker is asked in.
WORDS = {TYPES: OURS, VERIFY: OURS, LOCAL: PEER, GLOBAL: PEER, DTENSOR: BEFORE}


@contextmanager
def _checked(by: str) -> Generator[None]:
    """Enter what a checker needs on this rank."""
    mesh = device_mesh()
    with ExitStack() as stack:
        stack.enter_context(set_current_mesh(mesh))
        stack.enter_context(on_mesh(mesh))
        if by in (TYPES, VERIFY, BY_IMPORT):
            stack.enter_context(verify() if by == VERIFY else typecheck())
        elif by in (LOCAL, GLOBAL):
            stack.enter_context(SpmdTypes(local=by == LOCAL).checking(Mesh(mesh_sizes())))
        elif by == DTENSOR:
            stack.enter_context(explicit_redistribution(strict=True))
        yield


@contextmanager
def _running(by: str, words: str) -> Generator[None]:
    """Enter the mesh of a program that nobody checks."""
    mesh = device_mesh()
    with ExitStack() as stack:
        stack.enter_context(set_current_mesh(mesh))
        stack.enter_context(on_mesh(mesh))
        if words == PEER:
            stack.enter_context(SpmdTypes(local=True).running(Mesh(mesh_sizes())))
        yield


def mesh_sizes() -> dict[str, int]:
    mesh = device_mesh()
    assert mesh.mesh_dim_names is not None
    return {name: mesh.size(k) for k, name in enumerate(mesh.mesh_dim_names)}


def _on_rank(program: Program, of: Any, by: str, words: str) -> Found:
    parts = {
        name: split(value, of.HELD[name], of.MESH)[dist.get_rank()].detach().clone()
        for name, value in of.INPUTS.items()
    }
    for part in parts.values():
        part.requires_grad_(part.is_floating_point())
    block = _running(by, words) if by == PLAIN else _checked(by)
    with block:
        if by in (TYPES, VERIFY):
            for name, part in parts.items():
                assert_type(part, of.HELD[name])
        results = _listed(program(**parts))
    # The cotangent of each result, cut as the dual of its type says; outside of the checkers.
    seeded = [
        (y, w) for y, w in zip(results, _cotangents(of), strict=True) if y.requires_grad
    ]
    with _running(PLAIN, words):
        if seeded:
            torch.autograd.backward([y for y, _ in seeded], [w for _, w in seeded])
    gradients = {
        name: torch.zeros_like(part) if part.grad is None else part.grad.detach().clone()
        for name, part in parts.items()
        if part.requires_grad and seeded
    }
    return [_local(y).detach().clone() for y in results], gradients


def _local(y: Tensor) -> Tensor:
    """Return what this rank holds; FSDP2 leaves gradients and parameters as DTensors."""
    return y.to_local() if isinstance(y, DTensor) else y


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def _whole_results(of: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the results and the gradients of one device."""
    inputs = {
        name: x.detach().clone().requires_grad_(x.is_floating_point())
        for name, x in of.INPUTS.items()
    }
    results = _listed(of.program(**inputs))
    seeded = [(y, _weights(k, y)) for k, y in enumerate(results) if y.requires_grad]
    if seeded:
        torch.autograd.backward([y for y, _ in seeded], [w for _, w in seeded])
    gradients = {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in inputs.items()
        if x.requires_grad and seeded
    }
    return [y.detach() for y in results], gradients


def _weights(k: int, y: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(100 + k)
    return torch.randint(-3, 4, y.shape, generator=generator).double()


def _cotangents(of: Any) -> list[Tensor]:
    results, _ = _whole_results(of)
    found: list[Tensor] = []
    for k, (y, types) in enumerate(zip(results, of.RESULTS.values(), strict=True)):
        duals = {axis: dual(as_axis_type(t)) for axis, t in types.items()}
        found.append(split(_weights(k, y), duals, of.MESH)[dist.get_rank()])
    return found


def run(pattern: Pattern, program: Program, words: str, by: str = PLAIN) -> list[Found]:
    """Return what every rank finds; the cause is raised if a rank fails."""
    of = pattern.of_one_device
    with quiet(), silent_torch(), SpmdTypes(local=True).on_threads():
        try:
            return run_ranks(dict(of.MESH), lambda: _on_rank(program, of, by, words))
        except RankFailure as failure:
            raise cause_of(failure) from failure


def difference(pattern: Pattern, found: list[Found]) -> str | None:
    """Name the first result or gradient that is not that of one device; None if all are."""
    of = pattern.of_one_device
    results, gradients = _whole_results(of)
    for k, (name, types) in enumerate(of.RESULTS.items()):
        if not _is_joined([ys[k] for ys, _ in found], types, of.MESH, results[k]):
            return name
    for name, gradient in gradients.items():
        duals = {axis: dual(as_axis_type(t)) for axis, t in of.HELD[name].items()}
        if not _is_joined([g[name] for _, g in found], duals, of.MESH, gradient):
            return f"the gradient of {name}"
    return None


def _is_joined(parts: list[Tensor], types: Any, mesh: Any, whole: Tensor) -> bool:
    try:
        return torch.equal(join(parts, types, mesh).to(whole.dtype), whole)
    except (ValueError, RuntimeError):  # values that must be equal are not; shapes
        return False


@dataclass(frozen=True)
class Verdict:
    """What a checker says of the wrong program, and its words."""

    said: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.said}: `{self.why}`" if self.why else self.said

    @property
    def in_short(self) -> str:
        return re.split("[;:(,]", self.said)[0].strip()


@cache
def verdicts(name: str) -> dict[str, Verdict]:
    """Ask every checker about the wrong program of a pattern, in its own words."""
    pattern = load(name)
    found = {FORWARD: forward_verdict(pattern)}
    found[ADJOINT] = adjoint_verdict(pattern, BEFORE)
    for by, words in WORDS.items():
        wrong = pattern.wrong(words)
        if wrong is None:
            found[by] = Verdict("-")
        elif by in pattern.unchecked:
            found[by] = Verdict(f"refuses the right version, too: {pattern.unchecked[by]}")
        else:
            found[by] = _asked(pattern, wrong, words, by)
    return found


def forward_verdict(pattern: Pattern) -> Verdict:
    """Compare the results alone, which is what most tests do."""
    wrong = pattern.wrong(BEFORE)
    assert wrong is not None
    try:
        differs = difference(pattern, run(pattern, wrong, BEFORE))
    except Exception as error:
        return Verdict("fails", _said(error))
    seen = differs is not None and not differs.startswith("the gradient")
    return Verdict(f"finds it ({differs})" if seen else f"passes; wrong is {differs}")


def adjoint_verdict(
    pattern: Pattern, words: str, program: Program | None = None
) -> Verdict:
    """Ask `check_adjoint` about an unmodified program."""
    of = pattern.of_one_device
    wrong = program or pattern.wrong(words)
    whole = {n: x for n, x in of.INPUTS.items() if x.is_floating_point()}
    results, gradients = _whole_results(of)
    if wrong is None or not gradients or not all(y.is_floating_point() for y in results):
        return Verdict("-")
    rest = {n: x for n, x in of.INPUTS.items() if n not in whole}

    def called(**held: Tensor) -> Any:
        held |= {n: split(x, of.HELD[n], of.MESH)[dist.get_rank()] for n, x in rest.items()}
        with _running(PLAIN, words):
            return wrong(**held)

    inputs = {n: (x, of.HELD[n]) for n, x in whole.items()}
    outs = list(of.RESULTS.values())
    try:
        with quiet(), silent_torch():
            check_adjoint(called, inputs, outs, mesh=of.MESH)
    except AssertionError as error:
        return Verdict("finds it", _said(error))
    except (RankFailure, ValueError) as error:
        return Verdict("fails", _said(cause_of(error)))
    return Verdict("passes")


def _asked(pattern: Pattern, wrong: Program, words: str, by: str) -> Verdict:
    try:
        found = run(pattern, wrong, words, by)
    except Exception as error:
        if by in (TYPES, VERIFY):
            is_refusal = isinstance(error, PlacementError)
        else:
            is_refusal = isinstance(error, SpmdTypes.refusals)
        said = (
            "refuses" if is_refusal and not _fails_alone(pattern, wrong, words) else "fails"
        )
        return Verdict(said, _said(error))
    differs = difference(pattern, found)
    return Verdict(
        f"accepts; wrong is {differs}" if differs else "accepts; it is right here"
    )


def _fails_alone(pattern: Pattern, wrong: Program, words: str) -> bool:
    """Return whether a program fails where nobody checks it; refused is no failure."""
    try:
        run(pattern, wrong, words)
    except PlacementError:  # wrappers and checkpoints are looked at in any case
        return False
    except Exception:
        return True
    return False


def _said(error: BaseException) -> str:
    line = first_line(error) if isinstance(error, Exception) else str(error)
    line = re.sub(r" at [\w./<>-]+:\d+", "", line)
    line = re.sub(r"\s+", " ", line).replace("|", "/").replace("`", "'")
    return line if len(line) <= 160 else line[:157] + "..."
