"""The record of what typed collectives sent: axis, kind, bytes, dtype, caller.

The record of one training step is its communication ledger. Ranks whose records differ
did not run the same collectives.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from placements.runtime.blocks import Block, Steps, block
from placements.runtime.scopes import Scoped

# Why a collective is not compiled while a ledger is open.
UNRECORDED = (
    "compiled code tells no ledger() what it sends; call the function outside of ledger(), "
    "or record it uncompiled"
)


@dataclass(frozen=True)
class Entry:
    """One collective: `nbytes` is what this rank hands to it, with the padding if any."""

    axis: str
    kind: str
    nbytes: int
    dtype: str  # of what it carries, such as "bfloat16"
    caller: str
    backward: bool = False


@dataclass
class Ledger:
    """The collectives of a step, in the order in which this rank ran them."""

    entries: list[Entry] = field(default_factory=list[Entry])
    outer: "Ledger | None" = None  # the ledger of a block around this one
    listener: Callable[[Entry], None] | None = None  # is told of every entry

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        if self.outer is not None:
            self.outer.add(entry)
        if self.listener is not None:
            self.listener(entry)

    def counts(self) -> Counter[tuple[str, str]]:
        """Count the collectives by (axis, kind)."""
        return Counter((entry.axis, entry.kind) for entry in self.entries)

    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


_active: Scoped[Ledger | None] = Scoped("placements_ledger", None)


active_ledger = _active.get


def ledger() -> Block[Ledger]:
    """Record every typed collective until the block ends, backward included."""
    return activated(Ledger(outer=active_ledger()))


@block
def activated(record: Ledger) -> Steps[Ledger]:
    """Tell `record` of every typed collective until the block ends."""
    with _active.hold(record):
        yield record
