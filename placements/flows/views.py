"""Flows of ops that move dims about: views, permutations, cutting and joining."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from placements.extents import Extent, Folded, fold
from placements.flows.elementwise import dims_of
from placements.infer import Label, Mixed, Operand, Refusal, Term, combine
from placements.rules import LINEAR
from placements.tensor_type import TensorType, make
from placements.types import AxisType, Shard

if TYPE_CHECKING:
    from placements.ops import Op


def moved(input: Operand, labels: Sequence[Label]) -> TensorType:
    """A linear op that only moves dims about; an index keeps its domain."""
    return combine(LINEAR, [Term(input, tuple(labels))], index=input.type.index)


def recut(
    input: Operand, place: Callable[[str, int, Extent], tuple[int, Extent]]
) -> TensorType:
    """A view in which cut dims get another number and another extent.

    `place` is asked for the innermost cut first.
    """
    cut: list[tuple[str, AxisType]] = []
    for dim in reversed(range(input.ndim)):
        for axis, extent in reversed(input.type.cuts(dim)):
            cut.append((axis, Shard(*place(axis, dim, extent))))
    types: dict[str, AxisType] = dict(reversed(cut))
    rest = {axis: t for axis, t in input.type.items() if axis not in types}
    return make(input.type.mesh, {**types, **rest}, input.type.index, input.type.fresh)


def flat(values: Sequence[Any]) -> tuple[int, ...]:
    """view(2, 3) and view((2, 3)) alike."""
    if len(values) == 1 and isinstance(values[0], tuple | list):
        return tuple(cast(Any, values[0]))
    return tuple(values)


def reshape(op: "Op", input: Operand, *shape: Any, **kwargs: Any) -> TensorType:
    sizes = flat(shape) if shape else tuple(kwargs["shape"])
    if any(not isinstance(size, int) for size in sizes):
        if op.name == "view" and len(sizes) == 1:
            raise Refusal("view(dtype) re-reads the bytes; use .to(dtype)", operand=input)
        raise Refusal(f"reshape to {sizes}: sizes must be integers", operand=input)
    return _reshaped(input, sizes)


def reshape_as(op: "Op", input: Operand, other: Operand) -> TensorType:
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
            rest = {axis: t for axis, t in input.type.items() if axis not in cut}
            every = {**types, **rest}
            return make(input.type.mesh, every, input.type.index, input.type.fresh)
    return _reshaped(input, other.shape)


def flatten(op: "Op", input: Operand, start_dim: int = 0, end_dim: int = -1) -> TensorType:
    if input.ndim == 0:
        return moved(input, ())
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
    return _regrouped(input, sizes, groups)


def ravel(op: "Op", input: Operand) -> TensorType:
    return flatten(op, input)


def unflatten(op: "Op", input: Operand, dim: int, sizes: Sequence[int]) -> TensorType:
    dim, count = dim % input.ndim, len(sizes)
    whole = _with_rest(tuple(sizes), input.shape[dim])
    groups = [
        *(((d,), (d,)) for d in range(dim)),
        ((dim,), tuple(range(dim, dim + count))),
        *(((d,), (d + count - 1,)) for d in range(dim + 1, input.ndim)),
    ]
    shape = (*input.shape[:dim], *whole, *input.shape[dim + 1 :])
    return _regrouped(input, shape, groups)


def _with_rest(sizes: tuple[int, ...], numel: int) -> tuple[int, ...]:
    """Fill in the -1."""
    known = math.prod(size for size in sizes if size != -1)
    rest = numel // known if known else 0
    return tuple(rest if size == -1 else size for size in sizes)


Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _reshaped(input: Operand, sizes: tuple[int, ...]) -> TensorType:
    shape = _with_rest(sizes, math.prod(input.shape))
    return _regrouped(input, shape, _groups(input, sizes, shape))


def _groups(input: Operand, sizes: tuple[int, ...], shape: tuple[int, ...]) -> Groups:
    """Which dims of the input make which dims of the result.

    Dims are matched from the right, since features stand there, up to the -1 and then
    from the left; what is left over belongs together. A dim of no rows, or of one where
    other ranks have another number, looks like any other such dim here: it is matched by
    what stands around it only, never by its size.
    """
    old, new = input.shape, shape
    free = sizes.index(-1) if -1 in sizes else None
    vague = _vague(input)
    right = 0
    while right < min(len(old), len(new)):
        i, j = len(old) - 1 - right, len(new) - 1 - right
        if old[i] != new[j] or vague[i] or (free is not None and j <= free):
            break
        right += 1
    tail: Groups = [
        ((len(old) - 1 - k,), (len(new) - 1 - k,)) for k in reversed(range(right))
    ]
    i_end, j_end = len(old) - right, len(new) - right
    if free is not None and free < j_end:
        left = 0
        while left < min(free, i_end) and old[left] == new[left] and not vague[left]:
            left += 1
        head: Groups = [((k,), (k,)) for k in range(left)]
        if any(vague[left:i_end]):
            return [*head, (tuple(range(left, i_end)), tuple(range(left, j_end))), *tail]
        middle = _by_product(old, new, (left, i_end), (left, j_end))
        return [*head, *middle, *tail]
    if any(vague[:i_end]):
        return [(tuple(range(i_end)), tuple(range(j_end))), *tail]
    return [*_by_product(old, new, (0, i_end), (0, j_end)), *tail]


def _vague(input: Operand) -> list[bool]:
    """By dim, whether its size here does not tell it from other dims."""
    one_of_many = any(
        input.shape[dim] == 1 and len(set(extent.sizes)) > 1
        for dim in range(input.ndim)
        for _, extent in input.type.cuts(dim)
    )
    return [size == 0 or (size == 1 and one_of_many) for size in input.shape]


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
                return [(tuple(range(first_i, i_end)), tuple(range(first_j, j_end)))]
            i, j = (i + 1, j) if a < b else (i, j + 1)
        while i < i_end and old[i] == 1 and (j == j_end or new[j] != 1):
            i += 1
        while j < j_end and new[j] == 1 and (i == i_end or old[i] != 1):
            j += 1
        groups.append((tuple(range(first_i, i)), tuple(range(first_j, j))))
    return groups


def _regrouped(input: Operand, shape: tuple[int, ...], groups: Groups) -> TensorType:
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

    return recut(input, place)


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


def permute(op: "Op", input: Operand, *dims: Any, **kwargs: Any) -> TensorType:
    order = dims_of(flat(dims) if dims else kwargs["dims"], input.ndim)
    return moved(input, [order.index(d) for d in range(input.ndim)])


def transpose(op: "Op", input: Operand, dim0: int, dim1: int) -> TensorType:
    labels = list(range(input.ndim))
    a, b = dim0 % input.ndim, dim1 % input.ndim
    labels[a], labels[b] = labels[b], labels[a]
    return moved(input, labels)


def reverse_dims(op: "Op", input: Operand) -> TensorType:
    """t, .T: all dims in reverse order (t of at most two)."""
    return moved(input, list(reversed(range(input.ndim))))


def swap_last(op: "Op", input: Operand) -> TensorType:
    """.mT: the last two dims swapped."""
    return transpose(op, input, -2, -1)


def movedim(op: "Op", input: Operand, source: Any, destination: Any) -> TensorType:
    sources = dims_of(source, input.ndim)
    targets = dims_of(destination, input.ndim)
    rest = iter(d for d in range(input.ndim) if d not in sources)
    order = [
        sources[targets.index(d)] if d in targets else next(rest) for d in range(input.ndim)
    ]
    return moved(input, [order.index(d) for d in range(input.ndim)])


def squeeze(op: "Op", input: Operand, dim: Any = None) -> TensorType:
    named = dims_of(dim, input.ndim)
    gone = [d for d in named if input.shape[d] == 1]
    reason = "this dim has one row here, but it is cut: other ranks hold its other rows"
    labels: list[Label] = []
    place = 0
    for d in range(input.ndim):
        labels.append(Mixed(reason) if d in gone else place)
        place += d not in gone
    return moved(input, labels)


def unsqueeze(op: "Op", input: Operand, dim: int) -> TensorType:
    new = dim % (input.ndim + 1)
    return moved(input, [d + (d >= new) for d in range(input.ndim)])


def expand(op: "Op", input: Operand, *sizes: Any, **kwargs: Any) -> TensorType:
    shape = flat(sizes) if sizes else tuple(kwargs["size"])
    return _expanded(input, shape)


def expand_as(op: "Op", input: Operand, other: Operand) -> TensorType:
    return _expanded(input, other.shape)


def _expanded(input: Operand, shape: Sequence[int]) -> TensorType:
    shift = len(shape) - input.ndim
    labels: list[Label] = []
    for d in range(input.ndim):
        grows = shape[d + shift] not in (-1, input.shape[d])
        reason = "a dim that is cut cannot be broadcast: one row here is not one in all"
        labels.append(Mixed(reason) if grows else d + shift)
    return moved(input, labels)


def repeat(op: "Op", input: Operand, *sizes: Any, **kwargs: Any) -> TensorType:
    named = flat(sizes) if sizes else flat([kwargs.get("repeats", kwargs.get("dims"))])
    times = (*(1,) * (input.ndim - len(named)), *named)  # tile may name the last dims only
    shift = len(times) - input.ndim
    reason = "repeating a piece interleaves it with the other ranks' pieces"
    return moved(
        input,
        [d + shift if times[d + shift] == 1 else Mixed(reason) for d in range(input.ndim)],
    )


def repeat_interleave(
    op: "Op", input: Operand, repeats: Any, dim: int | None = None, **kwargs: Any
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

        return recut(input, grown)
    reason = "how often each row is repeated depends on data, so the pieces are unknown"
    labels: list[Label] = [d if d != along else Mixed(reason) for d in range(input.ndim)]
    terms = [Term(input, tuple(labels))]
    if isinstance(repeats, Operand):
        terms.append(Term(repeats, (Mixed(reason),) * repeats.ndim, is_control=True))
    return combine(LINEAR, terms, index=input.type.index)


PIECEWISE = "it would take rows of each rank's piece, not of the whole dim"


def without_dim(input: Operand, dim: int, reason: str = PIECEWISE) -> TensorType:
    """One row of a dim is taken, and the dim is gone."""
    gone = dim % input.ndim
    return moved(
        input,
        [Mixed(reason) if d == gone else d - (d > gone) for d in range(input.ndim)],
    )


def within_dim(input: Operand, dim: int, reason: str = PIECEWISE) -> TensorType:
    """Some rows of a dim are taken."""
    taken = dim % input.ndim
    return moved(input, [Mixed(reason) if d == taken else d for d in range(input.ndim)])


def narrow(op: "Op", input: Operand, dim: int, start: int, length: int) -> TensorType:
    return within_dim(input, dim)


def select(op: "Op", input: Operand, dim: int, index: int) -> TensorType:
    return without_dim(input, dim)


def unbind(op: "Op", input: Operand, dim: int = 0) -> tuple[TensorType, ...]:
    return (without_dim(input, dim),) * input.shape[dim]


def pieces(
    op: "Op", input: Operand, sizes: Any = None, dim: int = 0, **kwargs: Any
) -> list[TensorType]:
    """split, chunk: as many results as there are, all of one type."""
    return [within_dim(input, dim)]


def joined(op: "Op", tensors: Any, dim: int = 0, **kwargs: Any) -> TensorType:
    """cat: the dim that is joined must not be cut."""
    reason = "joining pieces interleaves them with the other ranks' pieces"
    operands: list[Operand] = list(tensors)
    terms: list[Term] = []
    for operand in operands:
        along = dim % operand.ndim
        labels = [Mixed(reason) if d == along else d for d in range(operand.ndim)]
        terms.append(Term(operand, tuple(labels)))
    return combine(LINEAR, terms, index=_common_index(operands))


def stacked(op: "Op", tensors: Any, dim: int = 0, **kwargs: Any) -> TensorType:
    operands: list[Operand] = list(tensors)
    new = dim % (operands[0].ndim + 1)
    terms = [
        Term(operand, tuple(d + (d >= new) for d in range(operand.ndim)))
        for operand in operands
    ]
    return combine(LINEAR, terms, index=_common_index(operands))


def _common_index(operands: Sequence[Operand]) -> Any:
    found = {operand.type.index for operand in operands}
    return found.pop() if len(found) == 1 else None


def triangle(op: "Op", input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """tril, triu: what is kept depends on where in the last two dims it stands."""
    reason = "which elements are kept depends on their place in the whole dim"
    labels = [d if d < input.ndim - 2 else Mixed(reason) for d in range(input.ndim)]
    return moved(input, labels)


def padded(
    op: "Op",
    input: Operand,
    pad: Sequence[int],
    mode: str = "constant",
    value: Any = None,
) -> TensorType:
    reason = "padding a piece puts pad rows between the ranks' rows"
    labels: list[Label] = list(range(input.ndim))
    for k in range(len(pad) // 2):
        if pad[2 * k] or pad[2 * k + 1]:
            labels[input.ndim - 1 - k] = Mixed(reason)
    return combine(
        op.linearity, [Term(input, tuple(labels))],
        index=input.type.index, adds_number=bool(value),
    )  # fmt: skip
