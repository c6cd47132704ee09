"""Mutants of ops.py: the linearity of every row, and what it does along a cut dim."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from placements.inference import ops
from placements.inference.op import SUM, Op
from placements.inference.ops import OPS, ROWS, Row
from placements.inference.rules import NO_VALUES, Linearity
from placements.inference.terms import Label
from placements.testing.cases import call_names
from placements.testing.laws.kept_numbers import KEEP_NUMBERS
from tests.laws.test_call_forms import NOT_DRAWN
from tests.mutants.killers import FORMS, Killer
from tests.mutants.known_forms import forms_of
from tests.mutants.mutant import Mutant, decided, sound
from tests.mutants.patches import Patches

CALLED = frozenset(call_names())


def some_names(row: Row, most: int = 2) -> list[str]:
    """A few names of a row, from both ends: all of a row share their flow."""
    forms = [(n, f"{n}_") for n in row.names.split()]
    names = [next(n for n in pair if n in CALLED) for pair in forms if CALLED & {*pair}]
    step = max(len(names) // most, 1)
    return names[::step][:most]


def forms_first(row: Row, names: Sequence[str]) -> tuple[Killer, ...]:
    """The laws of a row's ops: forms of several of them, then what takes longer."""
    every = [n for n in row.names.split() if n not in NOT_DRAWN]
    few = every[:: max(len(every) // 4, 1)][:4]
    forms = [forms_of(n, "", *part) for part in ((0, 40), (40, FORMS)) for n in few]
    padding = [("padding", name) for name in names]
    return (*forms, *decided(*names), *sound(*names), *padding)


def called(row: Row) -> str:
    """The name of a row: its group and its first op."""
    names = row.names.split()
    return f"{row.group}: {names[0]}" + (" ..." if len(names) > 1 else "")


def _other_linearity(row: Row, new: Linearity, p: Patches) -> None:
    for name in row.names.split():
        p.item(OPS, name, replace(OPS[name], linearity=new))


def of_linearities() -> Iterator[Mutant]:
    for row in ROWS:
        if row.linearity is NO_VALUES:
            continue
        names = some_names(row)
        killers = forms_first(row, names)
        killers += tuple(("numbers", n) for n in names if n in KEEP_NUMBERS)
        for new in Linearity:
            if new not in (row.linearity, NO_VALUES):
                yield Mutant(
                    "ops", called(row), f"{row.linearity.value} -> {new.value}",
                    partial(_other_linearity, row, new), killers,
                )  # fmt: skip


@dataclass(frozen=True)
class _Kept(Op):
    """An op that takes a dim it works along for one that it keeps."""

    def along_label(self, key: str) -> Label:
        last = key.split()[-1]
        return int(last) if last.isdecimal() else 0


def _other_along(row: Row, along: str, p: Patches) -> None:
    for name in row.names.split():
        p.item(OPS, name, replace(OPS[name], along=along))


def _kept_along(row: Row, p: Patches) -> None:
    for name in row.names.split():
        p.item(OPS, name, _Kept(**vars(OPS[name])))


def of_along() -> Iterator[Mutant]:
    for row in ROWS:
        if not row.along:
            continue
        names = some_names(row)
        killers = forms_first(row, names)
        old, new = ("a sum", ops.NEEDS_WHOLE) if row.along == SUM else ("refused", SUM)
        change = f"cut dim: {old} -> {'a sum' if new == SUM else 'refused'}"
        yield Mutant("ops", called(row), change, partial(_other_along, row, new), killers)
        yield Mutant(
            "ops", called(row), f"cut dim: {old} -> kept",
            partial(_kept_along, row), killers,
        )  # fmt: skip
