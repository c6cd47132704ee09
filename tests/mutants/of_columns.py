"""Mutants of the other columns of ops.py: zeros, forgets, takes, reads_floats."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from placements.inference.flows import elementwise
from placements.inference.ops import OPS, OWN_COUNT, ROWS, Row
from placements.inference.padding import ABSORBS, FLIPS, KEEPS
from tests.mutants.killers import FORMS, Killer
from tests.mutants.known_forms import forms_of
from tests.mutants.mutant import Mutant, sound
from tests.mutants.of_ops import CALLED, called, some_names
from tests.mutants.patches import Patches

# What the row says of zeros -> what it must not say. "keeps" is true of ops that absorb
# zeros, too: it only says less.
FALSE_OF_ZEROS: dict[str, dict[str, str]] = {
    "": {KEEPS: "zeros stay", ABSORBS: "zero wins", FLIPS: "zero becomes one"},
    KEEPS: {ABSORBS: "zero wins", FLIPS: "zero becomes one"},
    ABSORBS: {FLIPS: "zero becomes one"},
    FLIPS: {KEEPS: "zeros stay", ABSORBS: "zero wins"},
}
# Ops of two operands, where one zero is less than all zeros.
TWO_OPERANDS = ("maximum", "bitwise_or", "eq", "atan2")


def _other(row: Row, p: Patches, **columns: Any) -> None:
    for name in row.names.split():
        p.item(OPS, name, replace(OPS[name], **columns))


def _mutant(row: Row, change: str, killers: Sequence[Killer], **columns: Any) -> Mutant:
    apply = partial(_other, row, **columns)
    return Mutant("columns", called(row), change, apply, tuple(killers))


def of_columns() -> Iterator[Mutant]:
    for row in ROWS:
        names = row.names.split()
        if row.flow is elementwise.pointwise and "quotients" not in row.group:
            two = [n for n in TWO_OPERANDS if n in names and n in CALLED]
            padding = [("padding", n) for n in [*two, *some_names(row)]]
            padding += [("bools", n) for n in names]
            for zeros, said in FALSE_OF_ZEROS[row.zeros].items():
                if zeros == ABSORBS and row.zeros == KEEPS and not two:
                    continue  # of one operand both say the same
                yield _mutant(row, f"of zeros: {said}", padding, zeros=zeros)
        if row.forgets:
            counts = [("counts", n) for n in names if row.forgets == OWN_COUNT]
            forms = [forms_of(n, "", 0, FORMS) for n in names[:2]]
            killers = [*counts, *forms, *sound(*some_names(row))]
            yield _mutant(row, "may not forget", killers, forgets="")
        if row.takes:
            forms = [forms_of(n, "", 0, FORMS) for n in names[:2]]
            if OPS[names[0]].needs_memory:  # which no form is drawn of
                forms = [("shared draws", names[0])]
            yield _mutant(row, f"takes no {row.takes}", forms, takes="")
        if row.reads_floats:
            yield _mutant(
                row,
                "floats are not read",
                [("ends of bins", names[0])],
                reads_floats=False,
            )
