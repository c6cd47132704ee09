"""A row of the table of ops, and what it says of one op."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from placements.inference.rules import Linearity
from placements.inference.terms import Contract, Label, Mixed

Flow = Callable[..., Any]

SUM = "sum"

# What a slot of a call is. A call that has a tensor, or a number that belongs to an axis,
# in a slot whose role does not take it is refused, and so is an argument in a slot that the
# row does not name.
ROLES: dict[str, str] = {
    "value": "its elements enter the result: a tensor, or a number that counts like one",
    "control": "its elements choose or scale: a tensor or a number, which is no term of it",
    "size": "how long dims of the result are: numbers, or a tensor for its shape",
    "choice": "which elements come out, or how many: numbers",
    "subscript": "what stands in x[...]: numbers and slices choose, tensors index",
    "dim": "which dims are meant: plain numbers",
    "flag": "a plain setting",
    "dtype": "a dtype, or a tensor that stands for its dtype",
    "unread": "does not matter to placements: a device, a layout, a generator",
}

# Slots that never matter.
UNREAD = frozenset(
    "device layout pin_memory memory_format non_blocking copy generator sparse implicit "
    "_stacklevel cudnn_enable".split()
)

# Slots that mean the same in every op: the checker reads them, not the flow.
SETTINGS = frozenset({"inplace", "requires_grad"})


@dataclass(frozen=True)
class Row:
    """Ops that are alike, and why they are treated as they are."""

    group: str  # the heading on the page of rules
    names: str
    linearity: Linearity
    flow: Flow
    slots: str  # the role of each slot: "value input; dim dim"
    why: str
    along: str = ""  # SUM, or why a dim that it works along may not be cut
    takes: str = ""  # "mesh": a factory; "shared": also the axes that share a generator
    forgets: str = ""  # why pieces may become Varying, where they do
    zeros: str = ""  # what it makes of zeros, where its linearity does not say
    writes: bool = False  # it writes its input, under a name that does not say so
    overwrites: bool = False  # its in-place form replaces every element
    copies: bool = False  # the result has the elements of its input
    reads_floats: bool = False  # its type depends on more of a float than that it is zero
    needs_memory: bool = False  # without memory, or in odd shapes, torch crashes in it


@dataclass(frozen=True, kw_only=True)
class Op(Row):
    """One torch op: its row, and its own name."""

    name: str
    roles: Mapping[str, str]  # the name of a slot -> its role
    other_names: Mapping[str, str]  # another name that a form of the op has for a slot

    def along_label(self, key: str) -> Label:
        return Contract(key) if self.along == SUM else Mixed(self.along)


def parsed_slots(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """`value input; flag training/train` -> roles of slots, and other names of slots."""
    roles: dict[str, str] = {}
    others: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(";"))):
        role, *names = part.split()
        if role not in ROLES:
            raise ValueError(f"{role!r} is no role of a slot; roles are {list(ROLES)}")
        for name in names:
            first, *rest = name.split("/")
            roles[first] = role
            others |= {other: first for other in rest}
    return roles, others
