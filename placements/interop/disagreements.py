"""A peer and our checker on one program: where they disagree, and why.

Every disagreement must belong to a row of the table in `differences.py`.
"""

import re
from dataclasses import dataclass

from placements.interop import differences as table
from placements.interop.differences import DIFFERENCES, Difference
from placements.interop.engines import Engine, Ours, Running, Verdict, run
from placements.interop.judged import Judged
from placements.interop.vocabulary import without_extent
from placements.testing.programs import Statement
from placements.types.axis import AxisType, I, R, Shard, V
from placements.types.tensor import TensorType, make


@dataclass(frozen=True)
class Disagreement:
    """The first statement on which a peer says something else than we do."""

    engine: str
    judged: Judged  # up to and with that statement
    theirs: Verdict

    @property
    def statement(self) -> Statement:
        return self.judged.program.statements[-1]

    @property
    def ours(self) -> Verdict:
        return self.judged.verdicts[-1]

    @property
    def operands(self) -> list[TensorType]:
        types = self.judged.types
        return [types[k] for k in self.statement.args]

    @property
    def verdict(self) -> str:
        if self.theirs.crash is not None:
            return table.THEY_CRASH
        if self.ours.accepted and self.theirs.accepted:
            return table.OTHER_TYPE
        return table.THEY_REFUSE if self.ours.accepted else table.WE_REFUSE

    def __str__(self) -> str:
        return (
            f"{self.judged.program}\n  operands   {self.operands}\n"
            f"  placements {self.ours}\n  {self.engine} {self.theirs}"
        )


def disagreement(engine: Engine, judged: Judged) -> Disagreement | None:
    """Return the first statement of which a peer says something else than we do.

    Returns None if there is none, or if the peer cannot be asked from some statement on.
    A peer that crashes agrees with nobody.
    """
    if not engine.can_declare(judged.program):
        return None
    theirs = run(engine, judged.program)
    for k, (said, heard) in enumerate(zip(judged.verdicts, theirs, strict=False), 1):
        if heard.error == "NotAsked":
            return None
        if heard.crash is not None or not agree(engine, said, heard):
            return Disagreement(engine.name, judged.up_to(k), heard)
    return None


def agree(engine: Engine, ours: Verdict, theirs: Verdict) -> bool:
    """Return whether two verdicts are the same, in the words of the peer."""
    if ours.type is None or theirs.type is None:
        return not ours.accepted and not theirs.accepted
    said = engine.projected(ours.type)
    return said is not None and repr(said) == repr(theirs.type)


def explain(engine: Engine, found: Disagreement) -> Difference | None:
    """Return the row of the table that a disagreement belongs to."""
    return next((row for row in DIFFERENCES if _fits(engine, row, found)), None)


def _fits(engine: Engine, row: Difference, found: Disagreement) -> bool:
    statement = found.statement
    letters = {t.letter for operand in found.operands for t in operand.types}
    moved = _letters(statement)
    said = found.theirs.message or found.ours.message
    return (
        engine.name in row.engines
        and row.verdict == found.verdict
        and (not row.forms or statement.template in row.forms.split("; "))
        and (not row.moves or moved in row.moves.split())
        and (not row.operand or row.operand in letters)
        and (not row.says or re.search(row.says, said) is not None)
        and (not row.edit or _agree_after(engine, row.edit, found))
    )


def _letters(statement: Statement) -> str:
    """Return the letters of src and dst of a move; "same" for one cut and itself."""
    if statement.move is None:
        return ""
    _, _, src, dst = statement.move
    return "same" if repr(src) == repr(dst) != "V" else src.letter + dst.letter


def _agree_after(engine: Engine, edit: str, found: Disagreement) -> bool:
    """Return whether ours, asked about the edited operands, says what the peer said."""
    program, statement = found.judged.program, found.statement
    with Running(Ours(), program) as running:
        for earlier in program.statements[:-1]:
            running.run(earlier)
        text = statement.text
        if edit == table.NO_INVARIANT:
            text = text.replace("=I", "=R")
        operands = dict(zip(statement.args, found.operands, strict=True))
        ours = running.ask(
            text, {k: _edited(edit, t, statement) for k, t in operands.items()}
        )
    if ours.type is None or found.theirs.type is None:
        return agree(engine, ours, found.theirs)
    bare = {axis: without_extent(t) for axis, t in ours.type.items()}
    if edit == table.NO_EXTENTS:
        said = engine.projected(make(ours.type.mesh, bare))
        return repr(said) == repr(found.theirs.type)
    if edit in (table.MOVED_INNERMOST, table.NO_INVARIANT):  # the order of cuts aside
        told = {axis: engine.says(t) for axis, t in bare.items()}
        return told == dict(found.theirs.type)
    return agree(engine, ours, found.theirs)


def _edited(edit: str, t: TensorType, statement: Statement) -> dict[str, AxisType]:
    """Return an operand's type as the peer takes it."""
    if edit == table.NO_EXTENTS:
        return dict(t)
    types: dict[str, AxisType] = {axis: without_extent(one) for axis, one in t.items()}
    axis, src = (statement.move[1], statement.move[2]) if statement.move else ("", V)
    if edit == table.NO_INVARIANT:
        return {a: R if one == I else one for a, one in types.items()}
    if edit == table.MOVED_INNERMOST and axis:
        return {**{a: one for a, one in types.items() if a != axis}, axis: types[axis]}
    if edit in (table.FORGET_DIMS, table.TRUST_SRC_FORGET_DIMS):
        types = {a: V if isinstance(one, Shard) else one for a, one in types.items()}
    if edit in (table.TRUST_SRC, table.TRUST_SRC_FORGET_DIMS) and axis:
        types.pop(axis)
        types[axis] = src
    return types
