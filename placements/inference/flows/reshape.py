"""Flows of reshapes: which dims become which, and how a cut goes with them.

Flattening a dim that is cut, behind others, gives a `Folded` extent; splitting it again
gives the old one back. What cannot be said, or what ranks could see differently, is
refused.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.views import flat, moved, recut
from placements.inference.op import Op
from placements.inference.terms import Label, Mixed, Operand, Refusal, Term
from placements.types.axis import AxisType, Shard
from placements.types.extents import Extent, Folded, fold
from placements.types.padding import Pads, regrouped, repeated
from placements.types.tensor import TensorType, make


def reshape(op: Op, input: Operand, *shape: Any, **kwargs: Any) -> TensorType:
    sizes = flat(shape) if shape else tuple(kwargs["shape"])
    if any(not isinstance(size, int) for size in sizes):
        if op.name == "view" and len(sizes) == 1:
            raise Refusal("view(dtype) re-reads the bytes; use .to(dtype)", operand=input)
        raise Refusal(f"reshape to {sizes}: sizes must be integers", operand=input)
    return _reshaped(op, input, sizes)


def reshape_as(op: Op, input: Operand, other: Operand) -> TensorType:
    """As reshape; but if dims of `other`, flattened, are cut like this, cut like `other`.

    Sizes alone do not always tell which of several dims was cut, or how.
    """
    cut = [axis for axis, t in input.type.items() if isinstance(t, Shard)]
    width = other.ndim - input.ndim
    for first in range(input.ndim if cut and width > 0 else 0):
        last = first + width
        head, tail = other.shape[:first], other.shape[last + 1 :]
        if input.shape != (*head, math.prod(other.shape[first : last + 1]), *tail):
            continue
        flattened = flatten(op, other, first, last)
        if all(flattened[axis] == input.type[axis] for axis in cut):
            types: dict[str, AxisType] = {a: t for a, t in other.type.items() if a in cut}
            kept = moved(op, input, range(input.ndim))
            rest = {axis: t for axis, t in kept.items() if axis not in cut}
            found = make(kept.mesh, {**types, **rest}, kept.index, kept.fresh)
            groups = _split_groups(input.ndim, first, width + 1)
            return found.with_pads(padding.viewed(input, _view(input, other.shape, groups)))
    return _reshaped(op, input, other.shape)


def flatten(op: Op, input: Operand, start_dim: int = 0, end_dim: int = -1) -> TensorType:
    if input.ndim == 0:
        return moved(op, input, ())
    first, last = start_dim % input.ndim, end_dim % input.ndim
    groups = [
        *(((d,), (d,)) for d in range(first)),
        (tuple(range(first, last + 1)), (first,)),
        *(((d,), (d - last + first,)) for d in range(last + 1, input.ndim)),
    ]
    sizes = (
        *input.shape[:first],
        math.prod(input.shape[first : last + 1]),
        *input.shape[last + 1 :],
    )
    return _regrouped(op, input, sizes, groups)


def ravel(op: Op, input: Operand) -> TensorType:
    return flatten(op, input)


def unflatten(op: Op, input: Operand, dim: int, sizes: Sequence[int]) -> TensorType:
    dim, count = dim % input.ndim, len(sizes)
    whole = _with_rest(tuple(sizes), input.shape[dim])
    shape = (*input.shape[:dim], *whole, *input.shape[dim + 1 :])
    return _regrouped(op, input, shape, _split_groups(input.ndim, dim, count))


def _split_groups(ndim: int, dim: int, count: int) -> "Groups":
    """One dim becomes `count`, the others stay."""
    return [
        *(((d,), (d,)) for d in range(dim)),
        ((dim,), tuple(range(dim, dim + count))),
        *(((d,), (d + count - 1,)) for d in range(dim + 1, ndim)),
    ]


def _with_rest(sizes: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Fill in the -1."""
    known = math.prod(size for size in sizes if size != -1)
    rest = numel // known if known else 0
    return tuple(rest if size == -1 else size for size in sizes)


Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _reshaped(op: Op, input: Operand, sizes: tuple[int, ...]) -> TensorType:
    shape = _with_rest(sizes, math.prod(input.shape))
    if shape == input.shape:
        groups: Groups = [((dim,), (dim,)) for dim in range(input.ndim)]
    elif _has_slim_pieces(input):
        groups = _groups_by_rest(input, sizes)
    else:
        groups = _groups_by_size(input, sizes, shape)
    return _regrouped(op, input, shape, groups)


def _has_slim_pieces(input: Operand) -> bool:
    """Whether some rank holds one row or none where others hold more.

    There sizes do not tell dims apart, and the ranks would not agree on what was joined.
    """
    cuts = [extent for dim in range(input.ndim) for _, extent in input.type.cuts(dim)]
    uneven = any(min(e.sizes) <= 1 and len(set(e.sizes)) > 1 for e in cuts)
    return bool(cuts) and (uneven or 0 in input.shape)


def _groups_by_rest(input: Operand, sizes: tuple[int, ...]) -> Groups:
    """Dims that are not cut are matched from both ends; the rest belongs to the -1."""
    old, cut = input.shape, [bool(input.type.order(d)) for d in range(input.ndim)]
    free = sizes.index(-1) if -1 in sizes else len(sizes)
    left = 0
    while left < min(free, len(old)) and not cut[left] and old[left] == sizes[left]:
        left += 1
    right = 0
    while right < min(len(sizes) - 1 - free, len(old) - left):
        dim = len(old) - 1 - right
        if cut[dim] or old[dim] != sizes[len(sizes) - 1 - right]:
            break
        right += 1
    olds = tuple(range(left, len(old) - right))
    news = tuple(range(left, len(sizes) - right))
    # Several dims joined to the -1, or one dim split with the -1 as the last part.
    if -1 not in sizes or not (news == (free,) or (len(olds) == 1 and news[-1] == free)):
        axis = next(a for d in range(input.ndim) for a in input.type.order(d))
        raise Refusal(
            f"where a rank holds one row of a cut or none, sizes {old} to {sizes} do not "
            "tell which dims are joined; give the cut dim as -1, or use flatten, unflatten",
            axis,
            input,
            "reshape with -1 for the cut dim, flatten or unflatten",
        )
    head: Groups = [((k,), (k,)) for k in range(left)]
    shift = len(sizes) - len(old)
    tail: Groups = [((k,), (k + shift,)) for k in range(len(old) - right, len(old))]
    return [*head, (olds, news), *tail]


def _groups_by_size(
    input: Operand, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> Groups:
    """Dims are matched by size, from the right, since features stand there, up to the -1
    and then from the left; what is left over belongs together.
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


def _regrouped(
    op: Op, input: Operand, shape: tuple[int, ...], groups: Groups
) -> TensorType:
    by_dim = {dim: group for group in groups for dim in group[0]}
    # Sizes of the new dims with the cuts that were placed so far undone: a cut further
    # out counts the rows that the cuts further in share.
    rows = list(shape)

    def place(axis: str, dim: int, extent: Extent) -> tuple[int, Extent]:
        olds, news = by_dim[dim]
        if len(olds) == 1 and len(news) == 1:
            return news[0], extent
        whole = _flattened(input, olds, dim, extent)
        if len(news) == 1:
            return news[0], whole
        new, part = _unflattened(input, axis, shape, rows, news, whole)
        rows[new] = part.total
        return new, part

    return recut(op, input, place, _view(input, shape, groups))


def _view(
    input: Operand, shape: tuple[int, ...], groups: Groups
) -> Callable[[Pads], Pads | None]:
    cut = [dim for dim in range(input.ndim) if input.cut_axes(dim)]
    return lambda pads: regrouped(pads, input.shape, shape, groups, cut)


def _flattened(input: Operand, olds: tuple[int, ...], dim: int, extent: Extent) -> Extent:
    """The extent of `dim` after the dims `olds` became one.

    Dims before it are cut further out, so this rank's rows of them are the blocks; dims
    after it are cut further in, so all their rows belong to each row.
    """
    outer = math.prod(input.shape[d] for d in olds if d < dim)
    inner = math.prod(input.type.global_size(d, input.shape[d]) for d in olds if d > dim)
    return fold(outer, extent.scaled(inner) if inner != 1 else extent)


def _unflattened(
    input: Operand,
    axis: str,
    shape: tuple[int, ...],
    rows: Sequence[int],
    news: tuple[int, ...],
    extent: Extent,
) -> tuple[int, Extent]:
    """The dim among `news` that `axis` cuts after one dim became several."""
    outer = extent.outer if isinstance(extent, Folded) else 1
    inner = extent.inner if isinstance(extent, Folded) else extent
    blocks = 1
    rank = input.type.mesh.coordinate[axis]
    fitting: list[tuple[int, Extent]] = []
    for k, new in enumerate(news):
        if blocks == outer:
            rest = math.prod(rows[d] for d in news[k + 1 :])
            part = inner if rest == 1 else inner.divided(rest)
            if part is not None and part.local_size(rank) == rows[new]:
                fitting.append((new, part))
        blocks *= shape[new]
    # Dims of one row look alike here. Where all ranks hold equally many rows they choose
    # alike, and any choice is a view; where they do not, another rank may see another dim.
    if len(fitting) == 1 or (fitting and len(set(extent.sizes)) == 1):
        return fitting[0]
    raise Refusal(
        f"the pieces {extent!r} cannot be said of dims of sizes "
        f"{tuple(shape[d] for d in news)}; split the dim where it was flattened",
        axis,
        input,
        "a view that keeps the cut dim apart",
    )


def repeat_interleave(
    op: Op, input: Operand, repeats: Any, dim: int | None = None, **kwargs: Any
) -> TensorType:
    """Every row `repeats` times in place, so the pieces grow by that factor."""
    if dim is None:
        if input.ndim != 1:
            flat_type = flatten(op, input)
            input = Operand(
                flat_type, (math.prod(input.shape),), input.dtype, input.position
            )
        dim = 0
    along = dim % input.ndim
    if isinstance(repeats, int):

        def grown(axis: str, d: int, extent: Extent) -> tuple[int, Extent]:
            return d, extent.scaled(repeats) if d == along else extent

        return recut(op, input, grown, lambda pads: repeated(pads, along, repeats))
    reason = "how often each row is repeated depends on data, so the pieces are unknown"
    labels: list[Label] = [d if d != along else Mixed(reason) for d in range(input.ndim)]
    terms = [Term(input, tuple(labels))]
    if isinstance(repeats, Operand):
        terms.append(Term(repeats, (Mixed(reason),) * repeats.ndim, is_control=True))
    return combine(op.linearity, terms, index=input.type.index)
