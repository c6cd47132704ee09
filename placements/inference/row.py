"""A row of the table of ops: what ops that are alike have in common."""

from dataclasses import dataclass

from placements.inference.op import Flow
from placements.inference.rules import Linearity


@dataclass(frozen=True)
class Row:
    """Ops that are alike, and why they are treated as they are."""

    group: str
    names: str
    linearity: Linearity
    flow: Flow
    slots: str
    why: str
    along: str = ""
    takes: str = ""
    forgets: str = ""
    zeros: str = ""
    overwrites: bool = False
    copies: bool = False
    reads_floats: bool = False
    needs_memory: bool = False
