"""All engines on one program: where they disagree, and which known difference it is.

`python -m placements.interop.compare --markdown` prints docs/differences.md;
`--random 5000` counts what the engines say of so many drawn programs.
"""

import argparse
import random
import re
from collections import Counter
from dataclasses import dataclass

from placements.interop import differences as table
from placements.interop.checked import Checked, draw_checked
from placements.interop.differences import DIFFERENCES, Difference
from placements.interop.engines import Engine, Ours, Running, Verdict, run
from placements.interop.programs import Step
from placements.types.axis import AxisType, I, R, Shard, V
from placements.types.tensor import TensorType, make


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
        if self.theirs.crash is not None:
            return table.THEY_CRASH
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

    None if there is none, or if the peer cannot be asked from some step on. A peer that
    crashes agrees with nobody.
    """
    if not engine.can_declare(checked.program):
        return None
    theirs = run(engine, checked.program)
    for k, (said, heard) in enumerate(zip(checked.verdicts, theirs, strict=False), 1):
        if heard.error == "NotAsked":
            return None
        if heard.crash is not None or not agree(engine, said, heard):
            return Disagreement(engine.name, checked.up_to(k), heard)
    return None


def agree(engine: Engine, ours: Verdict, theirs: Verdict) -> bool:
    """Whether two verdicts are the same, in the words of the peer."""
    if ours.type is None or theirs.type is None:
        return not ours.accepted and not theirs.accepted
    said = engine.projected(ours.type)
    return said is not None and repr(said) == repr(theirs.type)


def explain(engine: Engine, found: Disagreement) -> Difference | None:
    """The row of the table that a disagreement belongs to."""
    return next((row for row in DIFFERENCES if _fits(engine, row, found)), None)


def _fits(engine: Engine, row: Difference, found: Disagreement) -> bool:
    step = found.step
    letters = {t.letter for operand in found.operands for t in operand.types}
    moved = _letters(step)
    said = found.theirs.message or found.ours.message
    return (
        engine.name in row.engines
        and row.verdict == found.verdict
        and (not row.forms or step.form in row.forms.split("; "))
        and (not row.moves or moved in row.moves.split())
        and (not row.operand or row.operand in letters)
        and (not row.says or re.search(row.says, said) is not None)
        and (not row.edit or _agree_after(engine, row.edit, found))
    )


def _letters(step: Step) -> str:
    """The letters of src and dst of a move; "same" for one cut and itself."""
    if step.move is None:
        return ""
    _, _, src, dst = step.move
    return "same" if repr(src) == repr(dst) != "V" else src.letter + dst.letter


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
        ours = running.ask(text, {k: _edited(edit, t, step) for k, t in operands.items()})
    if ours.type is None or found.theirs.type is None:
        return agree(engine, ours, found.theirs)
    bare = {axis: _bare(t) for axis, t in ours.type.items()}
    if edit == table.NO_EXTENTS:
        said = engine.projected(make(ours.type.mesh, bare))
        return repr(said) == repr(found.theirs.type)
    if edit in (table.MOVED_INNERMOST, table.NO_INVARIANT):  # the order of cuts aside
        told = {axis: engine.says(t) for axis, t in bare.items()}
        return told == dict(found.theirs.type)
    return agree(engine, ours, found.theirs)


def _bare(t: AxisType) -> AxisType:
    return Shard(t.dim) if isinstance(t, Shard) else t


def _edited(edit: str, t: TensorType, step: Step) -> dict[str, AxisType]:
    """An operand's type as the peer takes it."""
    if edit == table.NO_EXTENTS:
        return dict(t)
    types: dict[str, AxisType] = {axis: _bare(one) for axis, one in t.items()}
    axis, src = (step.move[1], step.move[2]) if step.move else ("", V)
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


def peers() -> list[Engine]:
    """The engines that are asked for a second opinion."""
    from placements.interop.dtensor import DTensorEngine
    from placements.interop.spmd_types import SpmdTypes

    return [SpmdTypes(local=True), SpmdTypes(local=False), DTensorEngine()]


def count_random(programs: int, seed: int) -> Counter[tuple[str, str]]:
    """(engine, outcome) of drawn programs; an unknown disagreement raises."""
    generator = random.Random(seed)
    counts: Counter[tuple[str, str]] = Counter()
    for _ in range(programs):
        checked = draw_checked(lambda options: generator.choice(list(options)))
        for engine in peers():
            if not engine.can_declare(checked.program):
                counts[engine.name, "cannot say the inputs"] += 1
                continue
            found = disagreement(engine, checked)
            row = explain(engine, found) if found else None
            if found and row is None:
                raise AssertionError(f"an unknown disagreement:\n{found}")
            counts[engine.name, f"{row.kind}: {row.key}" if row else "agree"] += 1
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m placements.interop.compare")
    parser.add_argument("--markdown", action="store_true", help="docs/differences.md")
    parser.add_argument("--random", type=int, metavar="N", help="draw N programs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from placements.interop.fake_world import fake_world
    from placements.interop.report import markdown, survey

    with fake_world():
        if options.random:
            for (engine, outcome), n in sorted(
                count_random(options.random, options.seed).items()
            ):
                print(f"{n:6}  {engine:18} {outcome}")
        else:
            print(markdown(survey()), end="")


if __name__ == "__main__":
    main()
