"""All engines on one program: where they disagree, and which known difference it is.

`python -m placements.interop.compare --markdown` prints docs/differences.md.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from placements.errors import PlacementError
from placements.interop import differences as table
from placements.interop.differences import DIFFERENCES, Difference
from placements.interop.engines import Engine, Ours, Running, Verdict, run
from placements.interop.programs import (
    FLOAT,
    FORMS,
    INTEGER,
    MOVES,
    Choose,
    Input,
    MESHES,
    Program,
    Step,
    axis_types,
    choose_inputs,
    choose_step,
    move,
)
from placements.tensor_type import TensorType
from placements.types import AxisType, I, R, Shard, V

MAX_STEPS = 5
_TRIES = 12


@dataclass(frozen=True)
class Checked:
    """A program, and what our checker says of each step; only the last may be refused."""

    program: Program
    verdicts: tuple[Verdict, ...]

    @property
    def types(self) -> list[TensorType]:
        """The types of all values, inputs first."""
        found = [x.type_on(self.program.mesh) for x in self.program.inputs]
        return found + [v.type for v in self.verdicts if v.type is not None]

    def up_to(self, count: int) -> "Checked":
        program = replace(self.program, steps=self.program.steps[:count])
        return Checked(program, self.verdicts[:count])


def draw_checked(choose: Choose) -> Checked:
    """A program that our checker accepts up to its last step.

    What torch itself refuses, because shapes do not fit, is left out.
    """
    sizes = choose(MESHES)
    program = Program(tuple(sizes.items()), choose_inputs(choose, sizes), ())
    kinds = [x.kind for x in program.inputs]
    verdicts: list[Verdict] = []
    with Running(Ours(), program) as running:
        for _ in range(_TRIES):
            types = Checked(program, tuple(verdicts)).types
            ndims = [value.dim() for value in running.values]
            step = choose_step(choose, program, kinds, types, ndims)
            if step is None:
                continue
            verdict = running.step(step)
            if not verdict.accepted and verdict.error != PlacementError.__name__:
                continue
            program = replace(program, steps=(*program.steps, step))
            verdicts.append(verdict)
            if not verdict.accepted or len(verdicts) == MAX_STEPS:
                break
            is_float = running.values[-1].dtype.is_floating_point
            kinds.append(FLOAT if is_float else INTEGER)
    return Checked(program, tuple(verdicts))


@dataclass(frozen=True)
class Disagreement:
    """The first step on which a peer says something else than we do."""

    engine: str
    checked: Checked  # up to and with that step
    theirs: Verdict

    @property
    def step(self) -> Step:
        return self.checked.program.steps[-1]

    @property
    def ours(self) -> Verdict:
        return self.checked.verdicts[-1]

    @property
    def operands(self) -> list[TensorType]:
        types = self.checked.types
        return [types[k] for k in self.step.args]

    @property
    def verdict(self) -> str:
        if self.ours.accepted and self.theirs.accepted:
            return table.OTHER_TYPE
        return table.THEY_REFUSE if self.ours.accepted else table.WE_REFUSE

    def __str__(self) -> str:
        return (
            f"{self.checked.program}\n  operands   {self.operands}\n"
            f"  placements {self.ours}\n  {self.engine} {self.theirs}"
        )


def disagreement(engine: Engine, checked: Checked) -> Disagreement | None:
    """Run a program under a peer, and find the first step where it differs from ours.

    None if there is none, or if the peer cannot be asked from some step on.
    """
    if not engine.can_declare(checked.program):
        return None
    theirs = run(engine, checked.program)
    for k, (said, heard) in enumerate(zip(checked.verdicts, theirs, strict=False), 1):
        if heard.error == "NotAsked":
            return None
        if not agree(engine, said, heard):
            return Disagreement(engine.name, checked.up_to(k), heard)
    return None


def agree(engine: Engine, ours: Verdict, theirs: Verdict) -> bool:
    """Whether two verdicts are the same, in the words of the peer."""
    if ours.type is None or theirs.type is None:
        return ours.accepted == theirs.accepted
    said = engine.projected(ours.type)
    return said is not None and repr(said) == repr(theirs.type)


def explain(engine: Engine, found: Disagreement) -> Difference | None:
    """The row of the table that a disagreement belongs to."""
    return next((row for row in DIFFERENCES if _fits(engine, row, found)), None)


def _fits(engine: Engine, row: Difference, found: Disagreement) -> bool:
    step = found.step
    letters = {t.letter for operand in found.operands for t in operand.types}
    moved = "".join(t.letter for t in step.move[2:]) if step.move else ""
    message = found.theirs.message if not found.theirs.accepted else ""
    return (
        engine.name in row.engines
        and row.verdict == found.verdict
        and (not row.forms or step.form in row.forms.split("; "))
        and (not row.moves or moved in row.moves.split())
        and (not row.operand or row.operand in letters)
        and (not row.says or re.search(row.says, message) is not None)
        and (not row.edit or _agree_after(engine, row.edit, found))
    )


def _agree_after(engine: Engine, edit: str, found: Disagreement) -> bool:
    """Whether ours, asked about the edited operands, says what the peer said."""
    program, step = found.checked.program, found.step
    with Running(Ours(), program) as running:
        for earlier in program.steps[:-1]:
            running.step(earlier)
        text = step.text
        if edit == table.NO_INVARIANT:
            text = text.replace("=I", "=R")
        operands = dict(zip(step.args, found.operands, strict=True))
        ours = running.ask(
            text, {k: _edited(edit, t, step) for k, t in operands.items()}
        )
    if edit == table.MOVED_INNERMOST and ours.type is not None:
        return found.theirs.type is not None and dict(ours.type) == dict(found.theirs.type)
    return agree(engine, ours, found.theirs)


def _edited(edit: str, t: TensorType, step: Step) -> dict[str, AxisType]:
    """An operand's type as the peer takes it."""
    types: dict[str, AxisType] = {
        axis: Shard(one.dim) if isinstance(one, Shard) else one for axis, one in t.items()
    }
    axis, src = (step.move[1], step.move[2]) if step.move else ("", V)
    if edit == table.NO_INVARIANT:
        return {a: R if one == I else one for a, one in types.items()}
    if edit == table.MOVED_INNERMOST:
        return {**{a: one for a, one in types.items() if a != axis}, axis: types[axis]}
    if edit in (table.FORGET_DIMS, table.TRUST_SRC_FORGET_DIMS):
        types = {a: V if isinstance(one, Shard) else one for a, one in types.items()}
    if edit in (table.TRUST_SRC, table.TRUST_SRC_FORGET_DIMS) and axis:
        types.pop(axis)
        types[axis] = src
    return types
