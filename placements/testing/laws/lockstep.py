"""Lockstep: all ranks run the same collectives in the same order, forward and backward.

Accepted programs do so whatever the values are, and where pieces are empty. A rank that
does otherwise is reported: the programs for that are source code, one collective a line,
in which the code of one rank is changed, so that it is known which line must be named.
"""

import re
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor

import placements
from placements.annotations.declarations import assert_type
from placements.checker.mode import typecheck
from placements.runtime.errors import PlacementError
from placements.runtime.ledger import Entry, ledger
from placements.runtime.mesh import set_current_mesh
from placements.testing.draw.whole_numbers import numbers, seeded
from placements.testing.laws.short_programs import programs, run_program
from placements.testing.programs import Input, Program
from placements.testing.ranks.crashes import check_judged
from placements.testing.ranks.failures import RankFailure
from placements.testing.ranks.run import device_mesh, run_ranks
from placements.types.axis import Shard
from placements.types.mesh import Mesh

Sent = list[tuple[str, str, bool]]  # axis, kind, whether in backward


@st.composite
def programs_with_empty_pieces(draw: st.DrawFn) -> Program:
    """Draw programs, also on values without rows."""
    program = draw(programs())
    if not draw(st.booleans()):
        return program
    return replace(program, inputs=tuple(map(_without_rows, program.inputs)))


def _without_rows(x: Input) -> Input:
    types = [(a, Shard(t.dim) if isinstance(t, Shard) else t) for a, t in x.types]
    return Input((0,) * len(x.shape), tuple(types))


def check_lockstep(program: Program) -> Sent | None:
    """Return what every rank sent; None if the program does not run, on any rank alike.

    AssertionError if ranks sent different things, RankFailure if they did not meet.
    """
    zeros = {f"x{k}": torch.zeros(x.shape) for k, x in enumerate(program.inputs)}
    try:
        run_program(program, **zeros)
    except RuntimeError:  # shapes do not fit on one device either
        return None
    plainly = partial(run_ranks, program.mesh.sizes, _run_plainly, program)
    ranks = run_ranks(program.mesh.sizes, _sent, program)
    for _, error in ranks:
        if error is not None:
            check_judged(error, plainly)
    first, *others = [(sent, error is None) for sent, error in ranks]
    for rank, other in enumerate(others, 1):
        assert other == first, f"{program}: rank 0 sent {first}, rank {rank} {other}"
    sent, is_accepted = first
    return sent if is_accepted else None


def _sent(program: Program) -> tuple[Sent, Exception | None]:
    """Return what this rank sends, with values of its own, and what ended it."""
    held = _held(program)
    with set_current_mesh(device_mesh()), ledger() as record:
        try:
            with typecheck():
                for value, x in zip(held.values(), program.inputs, strict=True):
                    assert_type(value, dict(x.types))
                y = run_program(program, **held)
        except (PlacementError, RuntimeError) as error:  # refused, by us or by torch
            return _in_short(record.entries), error
        if y.requires_grad:
            torch.autograd.grad(y.sum(), list(held.values()), allow_unused=True)
    return _in_short(record.entries), None


def _run_plainly(program: Program) -> None:
    with set_current_mesh(device_mesh()):
        run_program(program, **_held(program))


def _held(program: Program) -> dict[str, Tensor]:
    rank = dist.get_rank()
    mesh = program.mesh.seen_from(program.mesh.coordinates()[rank])
    return {
        f"x{k}": numbers(
            x.local_shape(mesh), seeded(program.seed, k, rank)
        ).requires_grad_()
        for k, x in enumerate(program.inputs)
    }


def _in_short(entries: list[Entry]) -> Sent:
    return [(entry.axis, entry.kind, entry.backward) for entry in entries]


FILE = "drawn.py"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MUTATIONS = (
    "skips", "other kind", "other axis", "other split sizes", "other dtype",
    "returns early", "raises", "skips backward",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """Calls of collectives by (kind, axis); at the call `at`, `victim` does otherwise."""

    mesh: Mesh
    calls: tuple[tuple[str, str], ...]
    splits: dict[str, tuple[int, ...]]  # by axis: how many rows go how many ranks further
    mutation: str
    victim: int
    at: int

    def source(self, rank: int, mutated: bool) -> str:
        """Return the program of one rank; no two calls have equal shapes."""
        lines = [self._call(rank, kind, axis) for kind, axis in self.calls]
        if mutated and rank == self.victim:
            lines[self.at] = self._otherwise(lines[self.at])
        every = ["def program(y):", *lines, "y.sum().backward()"]
        return "\n    ".join(every) + "\n"

    @property
    def line(self) -> int:
        """Where the other ranks of the group must be found waiting."""
        return self.last_line if self.mutation == "skips backward" else self.at + 2

    @property
    def last_line(self) -> int:
        return len(self.calls) + 2

    @property
    def peers(self) -> list[int]:
        """The other ranks of the group of the call `at`."""
        axis, places = self.calls[self.at][1], self.mesh.coordinates()
        own = {a: p for a, p in places[self.victim].items() if a != axis}
        return [
            r
            for r, place in enumerate(places)
            if r != self.victim and {a: p for a, p in place.items() if a != axis} == own
        ]

    def _call(self, rank: int, kind: str, axis: str) -> str:
        size, place = self.mesh.sizes[axis], self.mesh.coordinates()[rank][axis]
        steps = self.splits[axis]
        sends = [steps[(q - place) % size] for q in range(size)]
        receives = [steps[(place - q) % size] for q in range(size)]
        return {
            "all_reduce": f"y = all_reduce(wider(y), {axis!r}, src=P, dst=R)",
            "all_gather": f"y = all_gather(wider(y), {axis!r}, src=V, dst=R).sum(0)",
            "reduce_scatter": f"y = reduce_scatter(torch.stack([wider(y)] * {size}), "
            f"{axis!r}, src=P, dst=V)",
            "all_to_all": f"y = all_to_all(wider(y), {axis!r}, src=V, dst=V, "
            f"input_split_sizes={sends}, output_split_sizes={receives})",
        }[kind]

    def _otherwise(self, line: str) -> str:
        kind, axis = self.calls[self.at]
        match self.mutation:
            case "skips":
                return "y = wider(y)"
            case "other kind":
                other = COLLECTIVES[(COLLECTIVES.index(kind) + 1) % len(COLLECTIVES)]
                return self._call(self.victim, other, axis)
            case "other axis":
                other = next(a for a in self.mesh.sizes if a != axis)
                return self._call(self.victim, kind, other)
            case "other split sizes":
                steps = list(self.splits[axis])
                full = next(k for k, rows in enumerate(steps) if rows)
                steps[full] -= 1
                steps[full - 1] += 1
                splits = {**self.splits, axis: tuple(steps)}
                return replace(self, splits=splits)._call(self.victim, kind, axis)
            case "other dtype":
                return line.replace("wider(y)", "wider(y).float()") + ".double()"
            case "returns early":
                return "return"
            case "raises":
                return "raise LookupError('no such row')"
            case "skips backward":
                return f"{line}.detach().requires_grad_()"
            case _:
                raise AssertionError(self.mutation)


@st.composite
def mutants(draw: st.DrawFn, *, mutation: str, max_calls: int = 4) -> Mutant:
    """Draw programs in which one rank does otherwise, in the way that is named."""
    if mutation not in MUTATIONS or max_calls < 1:
        raise ValueError(f"mutants(mutation={mutation!r}, max_calls={max_calls})")
    wide = [Mesh({"dp": 2, "tp": 2}), Mesh({"dp": 2, "tp": 3})]
    narrow = [] if mutation == "other axis" else [Mesh({"tp": 2}), Mesh({"tp": 3})]
    mesh = draw(st.sampled_from([*narrow, *wide]))
    one = st.tuples(st.sampled_from(COLLECTIVES), st.sampled_from(list(mesh.sizes)))
    calls = draw(st.lists(one, min_size=1, max_size=max_calls))
    at = draw(st.integers(0, len(calls) - 1))
    if mutation == "other split sizes":
        calls[at] = "all_to_all", calls[at][1]
    rows = draw(st.integers(1, 3))
    splits: dict[str, tuple[int, ...]] = {}
    for axis, size in mesh.sizes.items():
        ends = sorted(draw(st.integers(0, rows)) for _ in range(size - 1))
        splits[axis] = tuple(b - a for a, b in zip([0, *ends], [*ends, rows], strict=True))
    victim = draw(st.integers(0, len(mesh.coordinates()) - 1))
    return Mutant(mesh, tuple(calls), splits, mutation, victim, at)


def check_mutant(mutant: Mutant, limit: float = 1.0) -> RankFailure:
    """Return the failure that the changed rank leads to; the next run is clean.

    AssertionError if it goes unnoticed, takes longer than `limit` seconds, or does not
    say for every rank which collective it was at, and in which line.
    """
    # Of the processor: others may use the machine. Waiting would end in another headline.
    started = time.process_time()
    try:
        _run(mutant, mutated=True)
    except RankFailure as error:
        failure = error
    else:
        raise AssertionError(f"{mutant}: nothing was reported")
    seconds = time.process_time() - started
    assert seconds < limit, f"{mutant}: reported after {seconds:.1f} s"
    _check_told(mutant, failure)
    first, *others = _run(mutant, mutated=False)
    assert len(first) == 2 * len(mutant.calls) and all(o == first for o in others), mutant
    return failure


def _run(mutant: Mutant, mutated: bool) -> list[Sent]:
    count = len(mutant.mesh.coordinates())
    sources = [mutant.source(rank, mutated) for rank in range(count)]
    rows = sum(next(iter(mutant.splits.values())))
    return run_ranks(mutant.mesh.sizes, _run_source, sources, rows)


def _run_source(sources: list[str], rows: int) -> Sent:
    names: dict[str, Any] = {**vars(placements), "torch": torch, "wider": _wider}
    exec(compile(sources[dist.get_rank()], FILE, "exec"), names)
    y = torch.ones(rows, 1, dtype=torch.float64, requires_grad=True)
    with set_current_mesh(device_mesh()), ledger() as record:
        names["program"](y)
    return _in_short(record.entries)


def _wider(y: Tensor) -> Tensor:
    return torch.cat([y, y[:, :1]], 1)


def _check_told(mutant: Mutant, failure: RankFailure) -> None:
    """Check that nobody passes the changed call alone, and everybody is located."""
    where = [_line_in(text) for text in failure.pending]
    story = f"{mutant}\n{failure}"
    assert "without any collective" not in failure.headline, story
    for rank in mutant.peers:
        assert where[rank] <= mutant.line and failure.pending[rank] != "returned", story
    own = failure.pending[mutant.victim]
    if mutant.mutation == "raises":
        assert failure.rank == mutant.victim and "LookupError: no such row" in own, story
    else:
        assert mutant.line in [where[rank] for rank in mutant.peers], story
    if mutant.mutation == "returns early":
        assert own == "returned", story
    assert where[mutant.victim] >= mutant.at + 2, story


def _line_in(text: str) -> int:
    """Return the line that a rank stands at; behind the last one if it returned."""
    if text == "returned":
        return 1_000_000
    found = re.fullmatch(
        rf"(\w+\(.*\) on group \[[\d, ]+\]|raised .*)  at {FILE}:(\d+)", text
    )
    assert found, f"no collective and line in {text!r}"
    return int(found[2])
