"""What the table says of one torch op."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from placements.inference.rules import Linearity
from placements.inference.terms import Contract, Label, Mixed

Flow = Callable[..., Any]


SUM = "sum"


@dataclass(frozen=True)
class Op:
    """One torch op."""

    name: str
    group: str
    linearity: Linearity
    flow: Flow
    along: str = ""
    takes: str = ""  # "mesh": a factory; "shared": also the axes that share a generator
    forgets: str = ""  # why pieces may become Varying, where they do

    def along_label(self, key: str) -> Label:
        return Contract(key) if self.along == SUM else Mixed(self.along)
