"""Flows of ops that put tensors side by side, or read elements at places of a dim."""

import math
from collections.abc import Sequence
from typing import Any, cast

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.broadcast import (
    adds,
    arithmetic_index,
    broadcast,
    dims_of,
)
from placements.inference.flows.elementwise import linearity_to
from placements.inference.flows.indexing import index_of_written
from placements.inference.flows.reshape import flatten
from placements.inference.flows.subscripts import getitem
from placements.inference.flows.views import common_index, moved, pieces
from placements.inference.op import Op
from placements.inference.rules import NONLINEAR
from placements.inference.sizes import Size, sizes_of, type_of_sizes
from placements.inference.terms import (
    NO_ARGUMENT,
    Label,
    Mixed,
    Operand,
    Refusal,
    Scattered,
    Term,
)
from placements.types.axis import V
from placements.types.index import COMPUTED
from placements.types.tensor import FILLED, TensorType

JOINED = "joining pieces interleaves them with the other ranks' pieces"
NEIGHBOURS = "the neighbour of a row at the edge of a piece is on another rank"
BOUNDS = "an element is looked for among all bounds, and this rank holds a piece of them"
TAKEN = "which elements of the source a piece takes depends on the pieces before it"


def _stacked(
    op: Op, tensors: Any, dim: int, places: Sequence[tuple[int, ...]]
) -> TensorType:
    """cat along `dim`; `places[n]` says where the dims of a tensor of n dims go first."""
    terms: list[Term] = []
    for operand in cast(Sequence[Operand], tensors):
        few = places[operand.ndim] if operand.ndim < len(places) else range(operand.ndim)
        labels: list[Label] = [Mixed(JOINED) if d == dim else d for d in few]
        terms.append(Term(operand, tuple(labels)))
    return combine(op.linearity, terms, index=common_index(tensors))


def hstack(op: Op, tensors: Any) -> TensorType:
    """Joined along dim 1; vectors along their only dim."""
    flat = max(x.ndim for x in cast(Sequence[Operand], tensors)) < 2
    return _stacked(op, tensors, 0 if flat else 1, ((), (0,)))


def vstack(op: Op, tensors: Any) -> TensorType:
    """Joined along dim 0; a vector is a row."""
    return _stacked(op, tensors, 0, ((), (1,)))


def dstack(op: Op, tensors: Any) -> TensorType:
    """Joined along dim 2, which tensors of fewer dims do not have yet."""
    return _stacked(op, tensors, 2, ((), (1,), (0, 1)))


def column_stack(op: Op, tensors: Any) -> TensorType:
    """Joined along dim 1; a vector is a column."""
    return _stacked(op, tensors, 1, ((), (0,)))


def at_least(op: Op, tensors: Any, *, dims: int) -> Any:
    """atleast_1d, atleast_2d, atleast_3d: dims of one row are added."""
    places = ((), (dims - 1 if dims < 3 else 1,), (0, 1))
    found = [
        moved(op, x, places[x.ndim] if x.ndim < dims else range(x.ndim))
        for x in _all_of(tensors)
    ]
    return found if len(found) > 1 else found[0]


def _all_of(tensors: Any) -> list[Operand]:
    """Several arguments, or one list of them."""
    given = cast(Any, tensors if isinstance(tensors, list | tuple) else [tensors])
    if len(given) == 1 and isinstance(given[0], list | tuple):
        given = given[0]
    return list(given)


def broadcast_together(op: Op, tensors: Any) -> list[TensorType]:
    """broadcast_tensors: each as expand makes it, to the sizes of all others."""
    every = _all_of(tensors)
    return _in_shape_of_all(op, every, broadcast(every))


def grid(op: Op, tensors: Any, indexing: Any = None) -> list[TensorType]:
    """meshgrid: the k-th tensor stands along dim k; with "xy" the first two change."""
    every = _all_of(tensors)
    places = list(range(len(every)))
    if indexing == "xy" and len(every) > 1:
        places[:2] = 1, 0
    labels = [(place,) * x.ndim for place, x in zip(places, every, strict=True)]
    return _in_shape_of_all(op, every, labels)


def _in_shape_of_all(
    op: Op, every: Sequence[Operand], labels: Sequence[tuple[Label, ...]]
) -> list[TensorType]:
    """The types of tensors that are expanded to each other's dims."""
    sizes = [
        Term(_shape_alone(x), own, is_control=True)
        for x, own in zip(every, labels, strict=True)
    ]
    found: list[TensorType] = []
    for k, x in enumerate(every):
        terms = [Term(x, labels[k]), *sizes[:k], *sizes[k + 1 :]]
        index = x.type.index
        found.append(combine(op.linearity, terms, index=index, at_pads=padding.same))
    return found


def _shape_alone(x: Operand) -> Operand:
    """A constant in the sizes of x: of its values nothing goes on."""
    own = tuple(axis for axis, t in x.type.items() if t == V)
    sizes = [*sizes_of(x), Size(1, varying=own)]
    ones = type_of_sizes(x.type.mesh, sizes, FILLED)
    return Operand(ones, x.shape, "bool", NO_ARGUMENT)


def taken(op: Op, input: Operand, index: Operand) -> TensorType:
    """take: as a subscript of the flattened tensor."""
    flat = flatten(op, input)
    size = (math.prod(input.shape),)
    return getitem(op, Operand(flat, size, input.dtype, input.position), index)


def filled_diagonal(
    op: Op, input: Operand, fill_value: Any, wrap: bool = False
) -> TensorType:
    """fill_diagonal_: the elements that are row 0, row 1, ... of all dims."""
    reason = "which elements are filled depends on their place in the whole dim"
    terms = [Term(input, (Mixed(reason),) * input.ndim)]
    if isinstance(fill_value, Operand):
        terms.append(Term(fill_value, ()))
    index = None if input.can_have_gradient else COMPUTED
    return combine(op.linearity, terms, index=index, adds_number=adds(fill_value))


def kron(op: Op, input: Operand, other: Operand) -> TensorType:
    """A product of which rows (i, j) of a dim are flattened: the second factor runs."""
    ndim = max(input.ndim, other.ndim)
    factors = (input, 0), (other, 1)
    shape = [1] * 2 * ndim
    terms: list[Term] = []
    for x, second in factors:
        places = [2 * (d + ndim - x.ndim) + second for d in range(x.ndim)]
        for place, size in zip(places, x.shape, strict=True):
            shape[place] = size
        terms.append(Term(x, tuple(places)))
    found = combine(op.linearity, terms, index=arithmetic_index([input, other]))
    for d in range(ndim):
        product = Operand(found, tuple(shape), input.dtype, input.position)
        found = flatten(op, product, d, d + 1)
        shape[d : d + 2] = [math.prod(shape[d : d + 2])]
    return found


def parts_along(op: Op, input: Operand, *, dim: int, **parts: Any) -> list[TensorType]:
    """hsplit, vsplit, dsplit: parts of one dim; a vector has only that one."""
    return pieces(op, input, dim if input.ndim > 1 else 0, **parts)


def difference(
    op: Op,
    input: Operand,
    n: int = 1,
    dim: int = -1,
    prepend: Any = None,
    append: Any = None,
) -> TensorType:
    """diff: each row minus the one before it; of bools, whether they differ."""
    (place,) = dims_of(dim, input.ndim)
    every = [x for x in (input, prepend, append) if isinstance(x, Operand)]
    labels = tuple(Mixed(NEIGHBOURS) if d == place else d for d in range(input.ndim))
    linearity = NONLINEAR if input.is_bool else op.linearity
    index = None if input.can_have_gradient else COMPUTED
    return combine(linearity, [Term(x, labels) for x in every], index=index)


def turned(op: Op, input: Operand, k: int = 1, dims: Any = (0, 1)) -> TensorType:
    """rot90: one of two dims is turned around, and they change places."""
    first, second = dims_of(dims, input.ndim)
    quarters = k % 4
    labels: list[Label] = list(range(input.ndim))
    if quarters % 2:
        labels[first], labels[second] = second, first
    for dim, around in ((first, (2, 3)), (second, (1, 2))):
        if quarters in around:
            labels[dim] = op.along_label(f"turned {dim}")
    return combine(op.linearity, [Term(input, tuple(labels))], index=input.type.index)


def bucketed(op: Op, input: Any, boundaries: Operand, **settings: Any) -> TensorType:
    """bucketize, searchsorted: how many bounds of the last dim are below each element."""
    mixed = (Mixed(BOUNDS),) * (boundaries.ndim > 0)
    terms = [Term(boundaries, (*range(boundaries.ndim - 1), *mixed))]
    if isinstance(input, Operand):
        last: tuple[Label, ...] = tuple(range(input.ndim))
        terms.insert(0, Term(input, last))
    return combine(op.linearity, terms, index=COMPUTED)


def is_among(op: Op, elements: Any, test_elements: Any, **settings: Any) -> TensorType:
    """isin: each element by itself, among all of another tensor."""
    terms: list[Term] = []
    if isinstance(elements, Operand):
        terms.append(Term(elements, tuple(range(elements.ndim))))
    if isinstance(test_elements, Operand):
        terms.append(Term(test_elements, (Mixed(BOUNDS),) * test_elements.ndim))
    return combine(op.linearity, terms, index=COMPUTED)


def masked_scatter(op: Op, input: Operand, mask: Operand, source: Operand) -> TensorType:
    """The elements of the source, in order, where the mask is True."""
    kept = broadcast([input, mask])
    if len(kept[0]) < mask.ndim:
        raise Refusal("a mask of more dims than the input", operand=mask)
    reason = Mixed(TAKEN)
    cut = any(x.type.cut_dims for x in (input, mask))
    own: list[tuple[Label, ...]] = [
        tuple(reason if cut else label for label in labels) for labels in kept
    ]
    terms = [
        Term(input, own[0]),
        Term(source, (reason,) * source.ndim),
        Term(mask, own[1], is_control=True),
    ]
    linearity = linearity_to(op, source, input.dtype)
    return combine(linearity, terms, index=index_of_written(input, source))


def distinct(op: Op, input: Operand, **settings: Any) -> TensorType:
    """unique: how many elements are distinct only the rank of a piece knows."""
    return combine(
        op.linearity,
        [Term(input, (Scattered(),) * input.ndim)],
        index=None if input.can_have_gradient else COMPUTED,
    )


def scattered_rows(
    op: Op, input: Operand, src: Operand, dim: int = 0, **places: Any
) -> TensorType:
    """slice_scatter, select_scatter: rows of a dim are replaced by those of a source."""
    taken = dim % input.ndim
    reason = Mixed("it would write rows of each rank's piece, not of the whole dim")
    labels: list[Label] = [reason if d == taken else d for d in range(input.ndim)]
    of_source = list(labels)
    if src.ndim < input.ndim:
        del of_source[taken]
    linearity = linearity_to(op, src, input.dtype)
    return combine(linearity, [Term(input, tuple(labels)), Term(src, tuple(of_source))])


def triangle(op: Op, input: Operand, diagonal: int = 0) -> TensorType:
    """tril, triu: what is kept depends on where in the last two dims it stands."""
    reason = "which elements are kept depends on their place in the whole dim"
    labels = [d if d < input.ndim - 2 else Mixed(reason) for d in range(input.ndim)]
    index = arithmetic_index([input])  # the others become zero
    return combine(op.linearity, [Term(input, tuple(labels))], index=index)
