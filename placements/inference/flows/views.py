"""Flows of ops that move dims about: views, permutations, cutting and joining."""

from collections.abc import Callable, Sequence
from typing import Any

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.broadcast import arithmetic_index, dims_of
from placements.inference.numbers import RankInt, facts_of
from placements.inference.op import Op
from placements.inference.sizes import Size, sizes_of, type_of_sizes
from placements.inference.terms import (
    NO_ARGUMENT,
    PIECEWISE,
    SHAPES,
    Label,
    Mixed,
    Operand,
    Refusal,
    Term,
)
from placements.types.axis import AxisType, Shard, V
from placements.types.extents import Extent, Folded
from placements.types.padding import Pads
from placements.types.tensor import FILLED, TensorType, make


def moved(op: Op, input: Operand, labels: Sequence[Label]) -> TensorType:
    """An op that only moves dims about; an index keeps its domain."""
    return combine(
        op.linearity,
        [Term(input, tuple(labels))],
        index=input.type.index,
        at_pads=padding.same,
    )


def view_of_cuts(
    op: Op,
    input: Operand,
    place: Callable[[str, int, Extent], tuple[int, Extent]],
    view: Callable[[Pads], Pads | None],
) -> TensorType:
    """A view in which cut dims get another number and another extent.

    `place` is asked for the innermost cut first; `view` for rows of padding.
    """
    kept = moved(op, input, range(input.ndim))
    cut: list[tuple[str, AxisType]] = []
    for dim in reversed(range(input.ndim)):
        for axis, extent in reversed(input.type.cuts(dim)):
            cut.append((axis, Shard(*place(axis, dim, extent))))
    types: dict[str, AxisType] = dict(reversed(cut))
    rest = {axis: t for axis, t in kept.items() if axis not in types}
    found = make(kept.mesh, {**types, **rest}, kept.index, kept.fresh)
    return found.with_pads(padding.viewed(input, view))


def permute(op: Op, input: Operand, dims: Any) -> TensorType:
    order = dims_of(dims, input.ndim)
    return moved(op, input, [order.index(d) for d in range(input.ndim)])


def transpose(op: Op, input: Operand, dim0: int, dim1: int) -> TensorType:
    if not input.ndim:
        return moved(op, input, [])  # torch lets one number have a last dim
    labels = list(range(input.ndim))
    a, b = dim0 % input.ndim, dim1 % input.ndim
    labels[a], labels[b] = labels[b], labels[a]
    return moved(op, input, labels)


def reverse_dims(op: Op, input: Operand) -> TensorType:
    """t, .T: all dims in reverse order (t of at most two)."""
    return moved(op, input, list(reversed(range(input.ndim))))


def movedim(op: Op, input: Operand, source: Any, destination: Any) -> TensorType:
    sources = dims_of(source, input.ndim)
    targets = dims_of(destination, input.ndim)
    rest = iter(d for d in range(input.ndim) if d not in sources)
    order = [
        sources[targets.index(d)] if d in targets else next(rest) for d in range(input.ndim)
    ]
    return moved(op, input, [order.index(d) for d in range(input.ndim)])


def squeeze(op: Op, input: Operand, dim: Any = None) -> TensorType:
    """Dims of one row go; an empty list of dims names none."""
    named = dims_of(dim, input.ndim)
    gone = [d for d in named if _may_be_one_row(input, d)]
    reason = "this dim has one row here, but it is cut: other ranks hold its other rows"
    labels: list[Label] = []
    place = 0
    for d in range(input.ndim):
        labels.append(Mixed(reason) if d in gone else place)
        place += d not in gone
    return moved(op, input, labels)


def _may_be_one_row(input: Operand, dim: int) -> bool:
    """Whether the dim has one row on some rank: all ranks must say the same of it."""
    cuts = input.type.cuts(dim)
    if not cuts:
        return input.shape[dim] == 1
    uneven_outside = any(not extent.equal_sizes for _, extent in cuts[:-1])
    return uneven_outside or 1 in cuts[-1][1].sizes


def unsqueeze(op: Op, input: Operand, dim: int) -> TensorType:
    new = dim % (input.ndim + 1)
    return moved(op, input, [d + (d >= new) for d in range(input.ndim)])


_GROWS = (
    "a dim that is cut keeps its size, which is written as -1 or read from the tensor: one "
    "row here is not one in all, and other ranks may have a different number of rows"
)


def expand(op: Op, input: Operand, size: Any) -> TensorType:
    """As a product with ones of these sizes: a new dim in the size of a piece is cut."""
    sizes = sizes_of(size)
    shift = len(sizes) - input.ndim
    labels: list[Label] = []
    grown = set(range(shift))
    for d in range(input.ndim):
        if _is_kept(input, d, sizes[d + shift]):
            labels.append(d + shift)
            continue
        labels.append(None if input.is_one_row(d) else Mixed(_GROWS))
        grown.add(d + shift)
    if all(sizes[d].is_plain for d in grown):
        return moved(op, input, labels)
    new = [n if d in grown else Size(1) for d, n in enumerate(sizes)]
    ones = type_of_sizes(input.type.mesh, new, FILLED)
    shape = Operand(ones, tuple(n.rows for n in new), "bool", NO_ARGUMENT)
    where = tuple(d if d in grown else None for d in range(len(sizes)))
    terms = [Term(input, tuple(labels)), Term(shape, where, is_control=True)]
    index = input.type.index
    return combine(op.linearity, terms, index=index, at_pads=padding.same)


def _is_kept(input: Operand, dim: int, wanted: Size) -> bool:
    """Whether the dim stays as it is; a plain number is the same on all ranks of a cut."""
    cuts = input.type.cuts(dim)
    if wanted.rows == -1:
        return True
    if wanted.is_plain and not all(extent.equal_sizes for _, extent in cuts):
        return False
    return wanted.rows == input.shape[dim] and (wanted.is_plain or wanted.cuts == cuts)


def repeat(op: Op, input: Operand, repeats: Any = None, dims: Any = None) -> TensorType:
    """The whole of each dim several times, so that a dim that is cut becomes blocks.

    Each block is cut as the dim was, and a rank holds its piece of every block.
    """
    given = dims if repeats is None else repeats
    if isinstance(given, Operand):
        raise Refusal("how often is said in numbers", operand=given, kind=SHAPES)
    named = sizes_of(given)
    once = Size(1)  # tile may name the last dims only
    times = (*(once,) * (input.ndim - len(named)), *named)
    shift = len(times) - input.ndim
    if not all(n.is_plain and n.rows for n in times):
        return _repeated_by_sizes(op, input, times)

    def place(axis: str, d: int, extent: Extent) -> tuple[int, Extent]:
        n = times[d + shift].rows
        return d + shift, extent if n == 1 else Folded(n, extent)

    def view(pads: Pads) -> Pads | None:
        if any(times[d + shift] != once for d in pads.dims):
            return None
        return Pads(pads.validity, tuple(d + shift for d in pads.dims))

    return view_of_cuts(op, input, place, view)


def _repeated_by_sizes(op: Op, input: Operand, times: Sequence[Size]) -> TensorType:
    """A dim that is not cut, as often as a piece has rows: the copies are cut so.

    All copies are alike, so rank r holds those that one device has in its place.
    """
    shift = len(times) - input.ndim
    reason = "repeating a piece interleaves it with the other ranks' pieces"
    labels: list[Label] = [
        d + shift if times[d + shift] == Size(1) else Mixed(reason)
        for d in range(input.ndim)
    ]
    if all(n.is_plain for n in times):
        return moved(op, input, labels)
    made: list[Size] = []
    for j, n in enumerate(times):
        rows = input.shape[j - shift] if j >= shift else 1
        own = tuple(axis for axis, _ in n.cuts) if not rows else ()
        cuts = tuple((axis, extent.scaled(rows)) for axis, extent in n.cuts if rows)
        made.append(Size(n.rows * rows, cuts, (*n.varying, *own)))
    copies = type_of_sizes(input.type.mesh, made, FILLED)
    shape = Operand(copies, tuple(n.rows for n in made), "bool", NO_ARGUMENT)
    where = tuple(j if times[j].cuts else None for j in range(len(times)))
    terms = [Term(input, tuple(labels)), Term(shape, where, is_control=True)]
    index = input.type.index
    return combine(op.linearity, terms, index=index, at_pads=padding.same)


def select(op: Op, input: Operand, dim: int, index: Any = 0) -> TensorType:
    """One row of a dim is taken, and the dim is gone."""
    gone = dim % input.ndim
    labels = [Mixed(PIECEWISE) if d == gone else d - (d > gone) for d in range(input.ndim)]
    return moved(op, input, labels)


def within_dim(op: Op, input: Operand, dim: int) -> TensorType:
    """Some rows of a dim are taken."""
    taken = dim % input.ndim
    labels = [Mixed(PIECEWISE) if d == taken else d for d in range(input.ndim)]
    return moved(op, input, labels)


def narrow(op: Op, input: Operand, dim: int, start: int, length: int) -> TensorType:
    if start == 0:
        input = padding.first_rows(input, dim % input.ndim, length)
    return within_dim(op, input, dim)


def unbind(op: Op, input: Operand, dim: int = 0) -> tuple[TensorType, ...]:
    return (select(op, input, dim),) * input.shape[dim]


def pieces(op: Op, input: Operand, dim: int = 0, **parts: Any) -> list[TensorType]:
    """split, chunk: as many results as there are, all of one type."""
    for name, given in parts.items():
        axes = [axis for axis, _ in facts_of(given).letters]
        # Of a Varying tensor the parts are each rank's own, as its rows are in unbind.
        if any(input.type.by_axis.get(axis) != V for axis in axes):
            raise Refusal(
                f"the argument {name!r} says how many parts there are, and this number "
                "belongs to an axis: ranks would have different numbers of parts",
                operand=input,
                expected="a plain number",
            )
    along = dim % input.ndim
    cuts = input.type.cuts(along)
    count = parts.get("chunks", parts.get("sections"))
    if count == 1 and count.__class__ is int:
        return [moved(op, input, range(input.ndim))]  # one part is all rows, of a piece too
    if len(cuts) == 1 and isinstance(count, int) and not isinstance(count, bool):
        extent = cuts[0][1]
        if isinstance(extent, Folded) and count > 0 and extent.outer % count == 0:
            return [_blocks(op, input, along, extent.outer // count)]
    return [within_dim(op, input, dim)]


def _blocks(op: Op, input: Operand, along: int, outer: int) -> TensorType:
    """Some blocks of a Folded dim: every rank takes its piece of the same blocks."""

    def fewer(axis: str, d: int, extent: Extent) -> tuple[int, Extent]:
        if d != along:
            return d, extent
        assert isinstance(extent, Folded) and extent.ranks is not None
        return d, Folded(outer, extent.inner).over(extent.ranks)

    return view_of_cuts(op, input, fewer, lambda pads: None if along in pads.dims else pads)


def joined(op: Op, tensors: Any, dim: int = 0) -> TensorType:
    """cat: the dim that is joined must not be cut."""
    reason = "joining pieces interleaves them with the other ranks' pieces"
    operands: list[Operand] = list(tensors)
    terms: list[Term] = []
    operands = [operand for operand in operands if not _is_nothing(operand)] or operands
    for operand in operands:
        along = dim % operand.ndim
        labels = [Mixed(reason) if d == along else d for d in range(operand.ndim)]
        terms.append(Term(operand, tuple(labels)))
    return combine(op.linearity, terms, index=common_index(operands))


def _is_nothing(operand: Operand) -> bool:
    """Whether it is `torch.tensor([])`, which may be joined to anything.

    A piece without rows is not: other ranks have rows of it.
    """
    is_constant = operand.type.is_number and not operand.type.cut_dims
    return is_constant and V not in operand.type.types and operand.shape == (0,)


def stacked(op: Op, tensors: Any, dim: int = 0) -> TensorType:
    operands: list[Operand] = list(tensors)
    new = dim % (operands[0].ndim + 1)
    terms = [
        Term(operand, tuple(d + (d >= new) for d in range(operand.ndim)))
        for operand in operands
    ]
    return combine(op.linearity, terms, index=common_index(operands))


def common_index(operands: Sequence[Operand]) -> Any:
    found = {operand.type.index for operand in operands}
    return found.pop() if len(found) == 1 else None


def padded(
    op: Op,
    input: Operand,
    pad: Sequence[int],
    mode: str = "constant",
    value: Any = None,
) -> TensorType:
    reason = "padding a piece puts pad rows between the ranks' rows"
    labels: list[Label] = list(range(input.ndim))
    # A number that belongs to an axis is zero on some ranks only.
    pads = [isinstance(n, RankInt) or n != 0 for n in pad]
    for k in range(len(pad) // 2):
        if pads[2 * k] or pads[2 * k + 1]:
            labels[input.ndim - 1 - k] = Mixed(reason)
    terms = [Term(input, tuple(labels))]
    if isinstance(value, Operand) and any(pads):
        terms.append(Term(value, ()))
        value = None
    return combine(
        op.linearity, terms,
        index=arithmetic_index([input]) if any(pads) else input.type.index,
        adds_number=bool(value) and any(pads),
    )  # fmt: skip
