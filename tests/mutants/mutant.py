"""One mutant, as data: the table, the row, what is flipped, and the laws to try."""

from collections.abc import Callable
from dataclasses import dataclass

from tests.mutants.killers import Killer
from tests.mutants.patches import Patches

LETTERS = "RIVSP"


@dataclass(frozen=True)
class Mutant:
    """One change of one row, and the laws that should notice."""

    table: str
    row: str
    change: str
    apply: Callable[[Patches], None]
    killers: tuple[Killer, ...]

    @property
    def name(self) -> str:
        return f"{self.table} | {self.row} | {self.change}"


def sound(*names: str) -> tuple[Killer, ...]:
    return tuple(("sound", name) for name in names)


def decided(*names: str) -> tuple[Killer, ...]:
    return tuple(("decided", name) for name in names)
