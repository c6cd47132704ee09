"""Which dims of a view are made of which, where rows of padding must find theirs."""

import math
from collections.abc import Callable, Sequence

from placements.inference.sizes import Size
from placements.inference.terms import Operand
from placements.types.padding import Groups, Pads, regrouped


def view_of_pads(
    input: Operand, shape: tuple[int, ...], sizes: Sequence[Size], groups: Groups
) -> Callable[[Pads], Pads | None]:
    """What a view makes of rows of padding; their dims are matched by size."""
    cut = [dim for dim in range(input.ndim) if input.cut_axes(dim)]
    if len(groups) == 1 and input.type.pads:
        written = tuple(size.rows for size in sizes)
        groups = _groups_by_size(input, written, shape)
    return lambda pads: regrouped(pads, input.shape, shape, groups, cut)


def _groups_by_size(
    input: Operand, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> Groups:
    """Match dims by size: from the right up to the -1, and then from the left.

    Features stand on the right. What is left over belongs together.
    """
    old, new = input.shape, shape
    free = sizes.index(-1) if -1 in sizes else None
    right = 0
    while right < min(len(old), len(new)):
        i, j = len(old) - 1 - right, len(new) - 1 - right
        if old[i] != new[j] or (free is not None and j <= free):
            break
        right += 1
    tail: Groups = [
        ((len(old) - 1 - k,), (len(new) - 1 - k,)) for k in reversed(range(right))
    ]
    i_end, j_end = len(old) - right, len(new) - right
    left = 0
    if free is not None:
        while left < min(free, i_end) and old[left] == new[left]:
            left += 1
    head: Groups = [((k,), (k,)) for k in range(left)]
    return [*head, *_by_product(old, new, (left, i_end), (left, j_end)), *tail]


def _by_product(
    old: tuple[int, ...],
    new: tuple[int, ...],
    old_range: tuple[int, int],
    new_range: tuple[int, int],
) -> Groups:
    """Close a group as soon as both sides have the same number of elements."""
    i, i_end = old_range
    j, j_end = new_range
    groups: Groups = []
    while i < i_end or j < j_end:
        first_i, first_j = i, j
        i, j = min(i + 1, i_end), min(j + 1, j_end)
        while True:
            a = math.prod(old[first_i:i])
            b = math.prod(new[first_j:j])
            if a == b:
                break
            if (a < b and i == i_end) or (b < a and j == j_end):
                rest = tuple(range(first_i, i_end)), tuple(range(first_j, j_end))
                return [*groups, rest]
            i, j = (i + 1, j) if a < b else (i, j + 1)
        while i < i_end and old[i] == 1 and (j == j_end or new[j] != 1):
            i += 1
        while j < j_end and new[j] == 1 and (i == i_end or old[i] != 1):
            j += 1
        groups.append((tuple(range(first_i, i)), tuple(range(first_j, j))))
    return groups
