"""Mutants of the slots in ops.py: another role for a slot, or a row that leaves it out.

`value -> control` and back is no mutant: a flow takes its slots by name and knows which of
them is which, so these two words are for the reader.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from placements.inference.op import parsed_slots
from placements.inference.ops import OPS, ROWS, Row
from placements.testing.forms.signatures import signatures
from tests.mutants.mutant import Mutant
from tests.mutants.of_ops import called
from tests.mutants.patches import Patches

LEFT_OUT = ""

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
        slots = {**OPS[name].slots, slot: role}
        if role == LEFT_OUT:
            del slots[slot]
        p.item(OPS, name, replace(OPS[name], slots=slots))


def ops_with(row: Row, slot: str, others: dict[str, str], most: int = 3) -> list[str]:
    """A few ops of a row that have the slot in a form that torch offers."""
    own = {slot, *(name for name, first in others.items() if first == slot)}
    own |= {"self", "tensor"} if slot == "input" else set()
    every = row.names.split()
    names = [
        name
        for name in every
        if slot == "*" or any(own & {s.name for s in way.slots} for way in signatures(name))
    ]
    names = names or every
    return names[:: max(len(names) // most, 1)][:most]


def of_roles() -> Iterator[Mutant]:
    for row in ROWS:
        roles, others = parsed_slots(row.slots)
        for slot, role in roles.items():
            killers = tuple(("forms", name) for name in ops_with(row, slot, others))
            for new in OTHER_ROLES[role]:
                yield Mutant(
                    "roles", f"{called(row)}, {slot}", f"{role} -> {new or 'left out'}",
                    partial(_other_role, row, slot, new), killers,
                )  # fmt: skip
