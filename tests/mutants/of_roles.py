"""Mutants of the slots in ops.py: another role for a slot, or a row that leaves it out.

`value -> control` and back is no mutant: a flow takes its slots by name and knows which of
them is which, so these two words are for the reader.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from placements.inference.op import parsed_slots
from placements.inference.ops import OPS, ROWS, Row
from placements.testing.forms.signatures import signatures
from tests.laws.test_call_forms import NOT_DRAWN
from tests.mutants.killers import FORMS, LAYERS, Killer
from tests.mutants.known_forms import forms_of
from tests.mutants.mutant import Mutant, decided, sound
from tests.mutants.of_ops import called
from tests.mutants.patches import Patches

LEFT_OUT = ""
FEW = 3  # ops of a row that are tried

# Kinds of slots where torch takes no number, so none that belongs to an axis.
PLAIN = frozenset({"flag", "text", "dtype", "device", "never"})

# role -> the roles that take its place
OTHER_ROLES: dict[str, tuple[str, ...]] = {
    "value": ("flag", "unread"),
    "control": ("flag", "unread"),
    "size": ("flag", "unread"),
    "choice": ("size", "flag", "unread"),
    "subscript": ("choice", "unread"),
    "dim": ("choice", "unread"),
    "flag": ("size", "unread", LEFT_OUT),
    "dtype": ("unread", LEFT_OUT),
    "unread": ("flag",),
}


def _other_role(row: Row, slot: str, role: str, p: Patches) -> None:
    for name in row.names.split():
        roles = {**OPS[name].roles, slot: role}
        if role == LEFT_OUT:
            del roles[slot]
        p.item(OPS, name, replace(OPS[name], roles=roles))


def names_of(slot: str, others: Mapping[str, str]) -> list[str]:
    """What torch's forms call a slot."""
    own = [slot, *(name for name, first in others.items() if first == slot)]
    return [*own, "self", "tensor"] if "input" in own else own


def ways_with(row: Row, slot: str, others: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The ops of a row that have the slot in a form that torch offers, and its kind."""
    own = names_of(slot, others)
    for name in row.names.split():
        for way in signatures(name):
            for each in way.slots:
                if slot == "*" or each.name in own:
                    yield name, each.kind


def _killers(names: Sequence[str], slots: str) -> tuple[Killer, ...]:
    """Forms about the slot first, few of each op, since most mutants die of the first."""
    drawn = [name for name in names if name not in NOT_DRAWN]
    steps = ((slots, 0, 10), (slots, 10, 40), ("", 0, 40), (slots, 40, FORMS))
    forms = [forms_of(n, about, *few) for about, *few in steps for n in drawn]
    others = [n for n in names if n in NOT_DRAWN]
    layers = [("layers", n) for n in names if n in LAYERS]
    return (*dict.fromkeys(forms), *layers, *sound(*others), *decided(*others))


def of_roles() -> Iterator[Mutant]:
    for row in ROWS:
        roles, others = parsed_slots(row.slots)
        for slot, role in roles.items():
            ways = list(ways_with(row, slot, others))
            names = list(dict.fromkeys(name for name, _ in ways)) or row.names.split()
            few = names[:: max(len(names) // FEW, 1)][:FEW]
            own = ",".join(names_of(slot, others))
            killers = _killers(few, "" if slot == "*" else own)
            takes_numbers = any(kind not in PLAIN for _, kind in ways)
            for new in OTHER_ROLES[role]:
                if takes_numbers or (role, new) != ("flag", "size"):
                    yield Mutant(
                        "roles", f"{called(row)}, {slot}", f"{role} -> {new or 'left out'}",
                        partial(_other_role, row, slot, new), killers,
                    )  # fmt: skip
