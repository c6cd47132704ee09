"""Flows of ops that reduce dims, or look along one: sums, choices, softmax, orders."""

from collections.abc import Sequence
from typing import Any, cast

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.broadcast import arithmetic_index, dims_of, terms_of
from placements.inference.flows.elementwise import linearity_to
from placements.inference.op import Op
from placements.inference.terms import Label, Mixed, Operand, Scattered, Term
from placements.types.index import COMPUTED, Index
from placements.types.tensor import TensorType


def reduced_labels(
    op: Op, input: Operand, dims: tuple[int, ...], keepdim: bool
) -> tuple[Label, ...]:
    labels: list[Label] = []
    place = 0
    for dim in range(input.ndim):
        if dim in dims:
            labels.append(op.along_label(f"reduced {dim}"))
            place += keepdim
        else:
            labels.append(place)
            place += 1
    return tuple(labels)


def _all_if_empty(dim: Any) -> Any:
    """Most reductions take an empty list of dims for all of them."""
    return None if dim in ((), []) else dim


def reduction(
    op: Op,
    input: Operand,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
    *,
    at_pads: padding.AtPads | None = None,
    **settings: Any,
) -> TensorType:
    """Dims are reduced away, whatever the order of a norm or the correction of a std."""
    labels = reduced_labels(op, input, dims_of(_all_if_empty(dim), input.ndim), keepdim)
    linearity, index = linearity_to(op, input, dtype), arithmetic_index([input])
    return combine(linearity, [Term(input, labels)], index=index, at_pads=at_pads)


def asked(op: Op, input: Operand, dim: Any = None, keepdim: bool = False) -> TensorType:
    """all, any: of a dim that is cut, the answer of each rank's own rows."""
    dims = dims_of(_all_if_empty(dim), input.ndim)
    padded = {d for pads in input.type.pads for d in pads.dims}
    labels = tuple(
        Scattered() if d in dims and d in input.type.cut_dims and d not in padded else label
        for d, label in enumerate(reduced_labels(op, input, dims, keepdim))
    )
    return combine(op.linearity, [Term(input, labels)], index=arithmetic_index([input]))


def mean(
    op: Op, input: Operand, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> TensorType:
    """A reduction; the mean of no rows is no number, whatever rows of padding hold."""
    at_pads = padding.averaged(input, dims_of(_all_if_empty(dim), input.ndim))
    return reduction(op, input, dim, keepdim, dtype, at_pads=at_pads)


def choice(
    op: Op,
    input: Operand,
    other: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    k: Any = None,
) -> Any:
    """max, kthvalue: elementwise with a second tensor, else a reduction that chooses.

    Along a dim it returns values and the rows they came from.
    """
    if isinstance(other, Operand):
        both = [input, other]
        return combine(op.linearity, terms_of(both), index=arithmetic_index(both))
    values = reduction(op, input, dim, keepdim).with_index(input.type.index)
    if dim is None:
        return values
    return values, values.with_index(rows_of(input, dim))


def position(op: Op, input: Operand, dim: Any = None, keepdim: bool = False) -> TensorType:
    """argmax, argmin: the row that was chosen."""
    return reduction(op, input, dim, keepdim).with_index(rows_of(input, dim))


def rows_of(input: Operand, dim: int | None) -> Index:
    """The domain of an index into a dim (or into all elements, which are not cut)."""
    if dim is None:
        size = 1
        for length in input.shape:
            size *= length
        return Index(size)
    if not input.ndim:
        return Index(1)
    return Index.of_rows(input.type.cuts(dim % input.ndim), input.shape[dim % input.ndim])


def _along_term(op: Op, input: Operand, dim: Any) -> Term:
    mixed = dims_of(dim, input.ndim)
    labels = tuple(
        op.along_label(f"along {d}") if d in mixed else d for d in range(input.ndim)
    )
    return Term(input, labels)


def along(
    op: Op, input: Operand, dim: Any = None, dtype: Any = None, **settings: Any
) -> TensorType:
    """Same shape; every element depends on the others along one dim."""
    linearity, index = linearity_to(op, input, dtype), arithmetic_index([input])
    return combine(linearity, [_along_term(op, input, dim)], index=index)


def moved_along(op: Op, input: Operand, dims: Any) -> TensorType:
    """flip: the same elements in other places along dims."""
    return combine(op.linearity, [_along_term(op, input, dims)], index=input.type.index)


def roll(op: Op, input: Operand, shifts: Any, dims: Any = None) -> TensorType:
    """Without dims the elements move in the flattened tensor; by 0 they do not move."""
    steps = cast(Sequence[Any], shifts if isinstance(shifts, list | tuple) else (shifts,))
    if all(step.__class__ is int and step == 0 for step in steps):
        return moved_along(op, input, ())
    return moved_along(op, input, _all_if_empty(dims))


def running_choice(op: Op, input: Operand, dim: int) -> Any:
    """cummax, cummin: values so far and the rows they came from, in the input's shape."""
    values = along(op, input, dim)
    return values, values.with_index(rows_of(input, dim))


def ordering(
    op: Op,
    input: Operand,
    dim: int = -1,
    descending: bool = False,
    stable: Any = None,
    k: Any = None,
    largest: bool = True,
    sorted: bool = True,
) -> Any:
    """sort, topk: values and the rows they came from, along one dim.

    Whole numbers that are sorted are ids, whose rows are put together by id; every rank
    may do so with its own rows.
    """
    is_own = bool(op.forgets) and not input.can_have_gradient
    term = _own_rows_term(input, dim) if is_own else _along_term(op, input, dim)
    values = combine(op.linearity, [term], index=input.type.index)
    return values, values.with_index(rows_of(input, dim))


def order_alone(
    op: Op, input: Operand, dim: int = -1, descending: bool = False, stable: Any = None
) -> TensorType:
    """argsort: the rows alone, of a dim that is cut the rank's own."""
    order = combine(op.linearity, [_own_rows_term(input, dim)], index=COMPUTED)
    return order.with_index(rows_of(input, dim))


def _own_rows_term(input: Operand, dim: int) -> Term:
    along = dims_of(dim, input.ndim)
    labels = tuple(Scattered() if d in along else d for d in range(input.ndim))
    return Term(input, labels)


def sorted_rows(op: Op, input: Operand) -> TensorType:
    """msort: the values alone, along the first dim."""
    return ordering(op, input, 0)[0]


_BINS = (
    "the bins depend on the data of each piece; say what the ids count (index=Index(E)) "
    "and give minlength=E (bincount), or give min= and max= (histc)"
)


def bincount(op: Op, input: Operand, weights: Any = None, minlength: int = 0) -> TensorType:
    """How often each id occurs; the counts of pieces add up.

    A larger id makes more bins, on its rank alone, unless the ids are known to be smaller.
    """
    domain = input.type.index
    is_below = isinstance(domain, Index) and (domain.size or minlength + 1) <= minlength
    terms = _counted(op, input, not is_below)
    if isinstance(weights, Operand):
        terms.append(Term(weights, terms[0].labels[:1] * weights.ndim))
    return combine(op.linearity, terms, index=COMPUTED)


def histc(
    op: Op, input: Operand, bins: int = 100, min: Any = 0, max: Any = 0
) -> TensorType:
    """How many elements lie in each bin; the counts of pieces add up."""
    return combine(op.linearity, _counted(op, input, min == max), index=COMPUTED)


def _counted(op: Op, input: Operand, length_is_data: bool) -> list[Term]:
    label = Mixed(_BINS) if length_is_data else op.along_label("counted")
    return [Term(input, (label,) * input.ndim, is_control=True)]
