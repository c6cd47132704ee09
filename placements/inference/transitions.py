"""Table: every way to change a type on one axis, forward; the backward is derived.

The gradient of a value of type dst has type dual(dst) and must become dual(src): that is
again a row of this table. So a row is right if its action and the action of its dual row
are adjoint, which the tests check for all of them.
"""

from dataclasses import dataclass, replace

from placements.types.axis import BY_LETTER, AxisType, dual


@dataclass(frozen=True)
class Transition:
    """src -> dst by `call`; `action` is what happens to the local tensors."""

    call: str
    src: str
    dst: str
    action: str
    meaning: str

    @property
    def communicates(self) -> str | None:
        return _COMMUNICATION.get(self.action)

    @property
    def sums(self) -> bool:
        """Whether the ranks' values are added up, so that they are rounded."""
        return self.communicates in ("all-reduce", "reduce-scatter")

    @property
    def dims_added(self) -> int:
        return _DIMS_ADDED.get(self.action, 0)

    @property
    def is_cast(self) -> bool:
        """Whether the result is another name for the memory of the input."""
        return self.action in _CASTS


# action -> the collective it needs; the other actions are local.
_COMMUNICATION = {
    "sum": "all-reduce",
    "gather": "all-gather",
    "stack": "all-gather",
    "sum and cut": "reduce-scatter",
    "sum and unbind": "reduce-scatter",
    "exchange": "all-to-all",
    "recut": "all-to-all",
}

# action -> how many dims it adds, with a row for each rank; the other actions keep them.
_DIMS_ADDED = {"stack": 1, "place row": 1, "unbind": -1, "sum and unbind": -1}

# The actions that move nothing; the others give memory of their own.
_CASTS = ("same", "first only")

TRANSITIONS: tuple[Transition, ...] = (
    Transition("all_reduce", "P", "R", "sum", "the sum, for use that differs by rank"),
    Transition("all_reduce", "P", "I", "sum", "the sum, for one repeated computation"),
    Transition("all_gather", "S", "R", "gather", "all pieces, joined"),
    Transition("all_gather", "S", "I", "gather", "all pieces, joined"),
    Transition("all_gather", "V", "R", "stack", "all values, stacked on a new dim"),
    Transition("all_gather", "V", "I", "stack", "all values, stacked on a new dim"),
    Transition("reduce_scatter", "P", "S", "sum and cut", "this rank's piece of the sum"),
    Transition("reduce_scatter", "P", "V", "sum and unbind", "this rank's row of the sum"),
    Transition("all_to_all", "V", "V", "exchange", "rows change ranks, by split sizes"),
    Transition("all_to_all", "S", "S", "recut", "cut along another dim"),
    Transition("convert", "I", "R", "same", "the same value, now used differently by rank"),
    Transition("convert", "R", "I", "same", "the same value, now one repeated computation"),
    Transition("convert", "R", "S", "cut", "this rank's piece"),
    Transition("convert", "I", "S", "cut", "this rank's piece"),
    Transition("convert", "S", "P", "place", "this rank's piece among zeros"),
    Transition("convert", "R", "P", "first only", "the value on one rank, zeros elsewhere"),
    Transition("convert", "I", "P", "first only", "the value on one rank, zeros elsewhere"),
    Transition("convert", "R", "V", "unbind", "this rank's row of the leading dim"),
    Transition("convert", "I", "V", "unbind", "this rank's row of the leading dim"),
    Transition("convert", "V", "P", "place row", "this rank's value as one row of zeros"),
    Transition("reinterpret", "V", "P", "same", "the values are now summands"),
    Transition("reinterpret", "R", "V", "same", "forget that the values are equal"),
    Transition("reinterpret", "R", "P", "same", "n equal summands: n times the value"),
    Transition("reinterpret", "S", "V", "same", "forget that the values are pieces"),
    Transition("reinterpret", "V", "S", "same", "the values are now pieces of one tensor"),
)

# The letter of a type -> that of its gradient.
DUAL_LETTERS = {"S": "S", **{letter: dual(t).letter for letter, t in BY_LETTER.items()}}

_UNCHANGED = "redistribute"  # of a row that is not in the table

_BY_CALL = {(t.call, t.src, t.dst): t for t in TRANSITIONS}
# `reinterpret` gives other meanings to the same data; everything else keeps the meaning,
# and there a pair of types names one row.
_MEANING_KEPT = {(t.src, t.dst): t for t in TRANSITIONS if t.call != "reinterpret"}


def find(call: str, src: AxisType, dst: AxisType) -> Transition | None:
    """Return the row of that call for these types; `redistribute` finds any that fits."""
    if call == "redistribute":
        return _MEANING_KEPT.get((src.letter, dst.letter))
    return _BY_CALL.get((call, src.letter, dst.letter))


def choices(call: str) -> list[str]:
    """The src -> dst pairs of a call, for error messages."""
    rows = [t for t in TRANSITIONS if t.call == call or call == "redistribute"]
    return [f"{t.src} -> {t.dst}" for t in rows]


def unchanged(t: AxisType) -> Transition:
    """Return what `redistribute` and the casts do where src and dst are the same."""
    return Transition(_UNCHANGED, t.letter, t.letter, "same", "the same value")


def dual_transition(row: Transition) -> Transition:
    """Return the row that runs in backward: dual(dst) -> dual(src)."""
    src, dst = DUAL_LETTERS[row.dst], DUAL_LETTERS[row.src]
    if row.call == _UNCHANGED:
        return replace(row, src=src, dst=dst)
    if row.call == "reinterpret":
        return _BY_CALL["reinterpret", src, dst]
    return _MEANING_KEPT[src, dst]


# call, src, dst -> the collectives that are needed forward and backward; None: none.
COSTS = {
    key: (t.communicates, dual_transition(t).communicates) for key, t in _BY_CALL.items()
}
