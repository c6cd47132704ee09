"""The one way to average over dims that are split: one sum over one count.

A mean of means weighs ranks, not elements, and is wrong as soon as ranks hold unequal
numbers of them. Here the division happens once, after both parts are complete.
"""

from collections.abc import Sequence

from torch import Tensor

from placements.collectives import redistribute
from placements.types.axis import AxisTypeLike, I, P, R
from placements.types.text import as_axis_type


def global_mean(
    total: Tensor,
    count: Tensor | float,
    axes: str | Sequence[str],
    *,
    total_src: AxisTypeLike = P,
    count_src: AxisTypeLike = P,
    dst: AxisTypeLike = I,
) -> Tensor:
    """Partial, Partial -> Invariant. The sum of all totals over the sum of all counts.

    `axes` are those over which the elements are split. A part that is complete already
    says so by `total_src` or `count_src` (R or I); a count that is a number is complete.
    `dst=P` leaves the total pending and divides it by the complete count: a loss that is
    only differentiated needs no more. No elements at all give NaN, as on one device.
    Backward: each rank's total gets the gradient of the mean over the whole count.
    Communicates: all-reduce over each axis, of what is Partial.

        >>> loss = global_mean(losses_T.sum(), valid_T.sum(), ("dp", "cp"))
    """
    dst = as_axis_type(dst)
    if dst.letter not in "IRP":
        raise ValueError(
            f"global_mean: dst={dst!r}, must be I, R or P: a mean is one value"
        )
    # A Partial divided by a count is Partial only if all ranks divide by the same.
    count_dst = R if dst.letter == "P" else dst
    for axis in (axes,) if isinstance(axes, str) else tuple(axes):
        total = redistribute(total, axis, total_src, dst)
        if isinstance(count, Tensor):
            count = redistribute(count, axis, count_src, count_dst)
    return total / count
