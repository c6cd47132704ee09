"""Ask the peers about the same bugs: run the programs under their checkers.

A program runs on every rank of the simulator under the peer's checker, with the peer's
collectives, types and declarations in the place of ours: `spmd_types` uses the same names
and arguments, and for DTensor a collective is a `redistribute`. Where our program needs a
word that a peer lacks, the package `programs` has the bug and its fix in the peer's
own words, or says why it cannot be written there.

A verdict is the checker's alone: an error that is raised without the checker too is none,
and an accepted program counts as a missed bug only if its results are not those of the
right program.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from placements import (
    AxisType,
    Mesh,
    Shard,
    UnsupportedTorchError,
    set_current_mesh,
    split,
    typecheck,
)
from placements._torch import explicit_redistribution
from placements.interop.engines import Engine, Ours, first_line
from placements.interop.fake_world import on_mesh, quiet, silent_torch
from placements.runtime.declared import declared
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.testing.ranks.crashes import cause_of
from placements.types.axis import BY_LETTER
from spmd_moe.bugs.peers.words import loaded
from spmd_moe.bugs.peers.written import unwritten, written_for
from spmd_moe.bugs.record import Bug

REFUSED, ACCEPTED, BOTH, NOT_WRITTEN = "refuses", "accepts", "refuses both", "-"
HARMLESS = "computes it right"
CRASHES = "crashes"
DTENSOR = "DTensor"
# Words of every program here: made anew for each peer, or plain torch.
SHARED = {
    "mine", "loaded", "placed", "locally", "from_local",
    "device_mesh", "axis_rank", "assert_type",
}  # fmt: skip

Function = Callable[..., Any]
Held = dict[str, Tensor]


@dataclass(frozen=True)
class Opinion:
    """What a peer says of a bug, and why, in one line.

    "refuses both": it refuses the right program too, so nothing follows from it.
    "computes it right": it accepts the program, which gives the right results there.
    "crashes": its checker raised what is none of its refusals, so it said nothing.
    """

    verdict: str
    why: str


@dataclass(frozen=True)
class _Run:
    """Results by rank, or the error; `in_step` is False if only the simulator objects.

    `crashed`: the error is none of those by which the checker refuses.
    """

    results: list[Held | None]
    error: BaseException | None = None
    in_step: bool = True
    crashed: bool = False

    @property
    def why(self) -> str:
        assert self.error is not None
        return f"{type(self.error).__name__}: {first_line(cast(Exception, self.error))}"


def peers() -> dict[str, Engine]:
    """Return the engines by name, without those that are not installed."""
    from placements.interop.dtensor import DTensorEngine

    found: list[Engine] = [DTensorEngine()]
    try:
        from placements.interop.spmd_types import SpmdTypes
    except ImportError:
        pass
    else:
        found = [SpmdTypes(local=True), SpmdTypes(local=False), *found]
    return {engine.name: engine for engine in found}


class SameWords(Ours):
    """Our own checker, asked as the peers are: types alone, and no word more."""

    def checking(self, mesh: Mesh) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.running(mesh))
        stack.enter_context(typecheck())
        return stack

    def running(self, mesh: Mesh) -> AbstractContextManager[Any]:
        return set_current_mesh(device_mesh())


def programs_of(engine_name: str, bug: Bug) -> tuple[Function | None, Function]:
    """Return the wrong and the right program of a bug, as a peer is asked."""
    found = written_for(engine_name, bug.id)
    if found is not None:
        return found
    right = bug.program("right")
    assert right is not None
    return bug.program("wrong"), right


def opinion_of(engine: Engine, bug: Bug) -> Opinion:
    """Run the wrong program, and the right one, under a peer."""
    why_not = unwritten(engine.name, bug.id)
    wrong, right = programs_of(engine.name, bug)
    missing: set[str] = set()
    for program in (wrong, right):
        if program is not None:
            missing |= _words_of_ours(program) - set(engine.names) - SHARED
    if why_not is not None or missing:
        return Opinion(NOT_WRITTEN, why_not or f"no {', '.join(sorted(missing))} there")
    checked = _run(engine, bug, right, checked=True)
    alone = checked if checked.error is None else _run(engine, bug, right, checked=False)
    if alone.error is not None:
        return Opinion(NOT_WRITTEN, f"the right program does not run: {alone.why}")
    if checked.crashed:
        return Opinion(CRASHES, f"on the right program: {checked.why}")
    if wrong is not None:
        return _opinion_of_wrong(engine, bug, wrong, alone.results, checked)
    # A correct program that must be accepted.
    if checked.error is not None:
        return Opinion(REFUSED, checked.why)
    return Opinion(ACCEPTED, "as it must")


def _opinion_of_wrong(
    engine: Engine, bug: Bug, wrong: Function, meant: list[Held | None], right: _Run
) -> Opinion:
    tried = _run(engine, bug, wrong, checked=True)
    if tried.error is None:
        differs = _different(tried.results, meant)
        if differs is None:
            return Opinion(HARMLESS, "its results are those of the right program")
        return Opinion(ACCEPTED, f"and {differs} is not that of the right program")
    if not tried.in_step:
        return Opinion(ACCEPTED, f"and then {first_line(cast(Exception, tried.error))}")
    alone = _run(engine, bug, wrong, checked=False)
    if alone.error is not None and alone.why == tried.why:
        return Opinion(NOT_WRITTEN, f"it does not run, checked or not: {alone.why}")
    if tried.crashed:
        return Opinion(CRASHES, tried.why)
    if right.error is not None:
        return Opinion(BOTH, f"{tried.why}; and the right one: {right.why}")
    return Opinion(REFUSED, tried.why)


def _run(engine: Engine, bug: Bug, program: Function, *, checked: bool) -> _Run:
    """Run a program on all ranks under a peer, or with the peer's words alone."""
    mesh = Mesh(bug.mesh)
    block = engine.checking if checked else engine.running

    def on_rank() -> Held | None:
        scope = _scope(engine, mesh, program)
        with on_mesh(device_mesh()), block(mesh):
            found = FunctionType(program.__code__, scope)()
        return None if found is None else _as_held(found)

    with quiet(), silent_torch(), _backward_unasked(engine), engine.on_threads():
        try:
            return _Run(run_ranks(dict(bug.mesh), on_rank))
        except RankFailure as failure:
            error = cause_of(failure)
            if isinstance(error, UnsupportedTorchError):
                raise error from None
            in_step = error is not failure
            return _Run([], error, in_step, in_step and not engine.refuses(error))


def _as_held(found: Mapping[str, Any]) -> Held:
    """Return what this rank holds; of a DTensor, the global value of its placements."""
    held = {name: x for name, x in found.items() if x is not None}
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in held.items()
    }


def _different(found: list[Held | None], meant: list[Held | None]) -> str | None:
    """Return the first result that differs from the right program's on some rank."""
    for rank, (one, other) in enumerate(zip(found, meant, strict=True)):
        assert one is not None and other is not None, "a program that is accepted returns"
        for name, y in other.items():
            x = one.get(name)
            if (
                x is None
                or x.shape != y.shape
                or not torch.allclose(x.double(), y.double())
            ):
                return f"{name} of rank {rank}"
    return None


@contextmanager
def _backward_unasked(engine: Engine) -> Generator[None]:
    """Let DTensor redistribute in a backward by itself; only forwards must be explicit."""
    if engine.name != DTENSOR:
        yield
        return
    tensor: Any = Tensor
    plain = tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        with explicit_redistribution(enable=False):
            plain(self, *args, **kwargs)

    tensor.backward = backward
    try:
        yield
    finally:
        tensor.backward = plain


def _scope(engine: Engine, mesh: Mesh, program: Function) -> dict[str, Any]:
    """Return the globals of a program, in the words of a peer."""
    if isinstance(engine, SameWords):
        return program.__globals__
    mine, assert_type = _declarations(engine, mesh)
    scope: dict[str, Any] = {**program.__globals__, **engine.names}
    scope |= {"mine": mine, "placed": mine, "assert_type": assert_type}
    scope["axis_rank"] = _axis_rank
    scope["locally"] = engine.locally
    for name, value in program.__globals__.items():
        if _is_beside(value, program):  # helpers speak the peer's words, too
            scope[name] = FunctionType(value.__code__, scope, name, value.__defaults__)
            scope[name].__kwdefaults__ = value.__kwdefaults__
    return scope


def _axis_rank(axis: str) -> int:
    """Return this rank on an axis as a plain number, which is all that peers know."""
    return device_mesh().get_local_rank(axis)


def _declarations(engine: Engine, mesh: Mesh) -> tuple[Function, Function]:
    """Make `mine` and `assert_type` for a peer; types come in the peer's words."""
    ours = {id(word): letter for letter, word in engine.names.items() if letter in "RIVP"}

    def axis_type(said: Any) -> AxisType:
        if isinstance(said, AxisType):  # a constant of the program's file
            return said
        letter = ours.get(id(said))
        return Shard(said.dim) if letter is None else BY_LETTER[letter]

    def assert_type(held: Tensor, types: Any) -> Any:
        own = {axis: axis_type(said) for axis, said in types.items()}
        return engine.declare(held, declared(mesh, own, tuple(held.shape)))

    def mine(value: Tensor, types: Any, *, grad: bool = False) -> Any:
        own = {axis: axis_type(said) for axis, said in types.items()}
        held = loaded(split(value, own, mesh)).requires_grad_(grad)
        found = engine.declare(held, declared(mesh, own, tuple(held.shape)))
        # A leaf, so that it gets the gradient.
        return found if found.is_leaf else found.detach().requires_grad_(grad)

    return mine, assert_type


def _is_beside(value: Any, program: Function) -> bool:
    """Return whether a value is a plain function of the program's own file."""
    return (
        isinstance(value, FunctionType)
        and value.__module__ == program.__module__
        and value.__closure__ is None
    )


def _words_of_ours(program: Function) -> set[str]:
    """Return the names of our packages that a program, or a helper beside it, uses."""
    found: set[str] = set()
    for name in program.__code__.co_names:
        value = program.__globals__.get(name)
        if _is_beside(value, program):
            if value is not program:
                found |= _words_of_ours(cast(FunctionType, value))
            continue
        owner = value if isinstance(value, type | FunctionType) else type(value)
        if owner.__module__.partition(".")[0] in ("placements", "spmd_moe"):
            found.add(name)
    return found
