"""What a write makes of the type of what is written: of a whole, and of parts of a buffer.

The types of a view and of the tensor below it differ in the numbers of their dims, but say
the same letter on every axis. So what was written to a part is known of the whole by
letters, and a dim that is cut stays cut.
"""

from placements.inference import padding
from placements.inference.combine import as_numbers
from placements.inference.rules import LINEAR, join
from placements.inference.terms import Operand, Refusal
from placements.types.axis import BY_LETTER, AxisType, Shard, V
from placements.types.index import COMPUTED, Computed, Index
from placements.types.tensor import EMPTY, FILLED, MADE, TensorType, make


def whole_after(
    whole: TensorType, part: TensorType, written: TensorType
) -> TensorType | None:
    """Return the type of a fresh buffer, a part of which became `written`; None: unknown.

    What the rest holds counts as a term: zeros fit everything, and memory that nobody wrote
    is nobody's, on one device as on many.
    """
    if whole.mesh != written.mesh or whole.pads or written.pads:
        return None
    domain = _domain(whole, written)
    if isinstance(domain, Index) and domain.cuts:
        return None
    types: dict[str, AxisType] = {}
    for axis, t in whole.items():
        before, after = part[axis], written[axis]
        if isinstance(t, Shard) or isinstance(after, Shard):
            if not isinstance(t, Shard) or not isinstance(before, Shard) or before != after:
                return None
            types[axis] = t
            continue
        if whole.fresh == FILLED and after.letter == "P":
            return None
        goes_along = whole.is_number or whole.fresh == EMPTY
        goes_along = goes_along or (t.letter, after.letter) == ("R", "I")
        letters = [after.letter] if goes_along else [t.letter, after.letter]
        gives = join(LINEAR, letters).gives
        if gives is None:
            return None
        types[axis] = BY_LETTER[gives]
    return make(whole.mesh, types, domain, None if written.fresh is None else MADE)


def _domain(whole: TensorType, written: TensorType) -> Index | Computed | None:
    if whole.fresh == EMPTY or whole.index == written.index:
        return written.index
    return COMPUTED


def part_of(whole: TensorType, part: TensorType) -> TensorType | None:
    """Return the type of a view whose type was `part`, from what the whole is now."""
    if whole.mesh != part.mesh or whole.pads or part.pads:
        return None
    types: dict[str, AxisType] = {}
    for axis, before in part.items():
        now = whole[axis]
        if isinstance(now, Shard) != isinstance(before, Shard):
            return None
        types[axis] = before if isinstance(before, Shard) or before == V else now
    return make(part.mesh, types, whole.index, None if whole.fresh is None else MADE)


def _check_counts(target: Operand, found: TensorType) -> None:
    """Refuse to write anything but numbers of the same own rows over such numbers."""
    if target.type.index == found.index:
        return
    raise Refusal(
        "numbers of each rank's own rows are pieces only as an index of those rows, and "
        "what is written here counts other rows, or none",
        operand=target,
        expected=f"an index ({target.type.index!r})" if target.type.index else "numbers",
        kind="policy",
    )


def written_over(target: Operand, found: TensorType) -> TensorType:
    """Return the type after an in-place op: that of its target, unless it is fresh."""
    old = target.type
    if old.fresh is not None:
        return found
    if as_numbers(old) is not old or as_numbers(found) is not found:
        _check_counts(target, found)
    if old.types == found.types and old.orders == found.orders:
        return padding.written_in_place(target, found)
    axis = next((a for a in old if old[a] != found[a]), None)
    raise Refusal(
        f"an in-place op cannot change a type, here to {found!r}: other names for the "
        "same memory would not know",
        axis,
        target,
        repr(found[axis]) if axis else repr(found),
        kind="policy",  # docs/decisions.md, 6: whatever else would be right
    )
