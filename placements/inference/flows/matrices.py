"""Flows of matrices: linear algebra of the last two dims, diagonals, products of all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from placements.inference.combine import combine
from placements.inference.flows.broadcast import (
    arithmetic_index,
    broadcast,
    dims_of,
    terms_of,
)
from placements.inference.flows.products import inner_value, matmul, plus
from placements.inference.flows.views import moved
from placements.inference.op import Op
from placements.inference.rules import MULTILINEAR
from placements.inference.terms import Contract, Label, Mixed, Operand, Refusal, Term
from placements.types.tensor import TensorType

MATRIX = "it needs whole matrices, and this rank holds a piece of each"
DIAGONAL = "what is on the diagonal depends on the place in the whole of both dims"


def _lead(x: Operand, last: int = 2) -> tuple[Label, ...]:
    """Labels that keep the dims before the last ones."""
    kept = max(x.ndim - last, 0)
    return (*range(kept), *(Mixed(MATRIX) for _ in range(x.ndim - kept)))


def each(op: Op, input: Operand, **settings: Any) -> TensorType:
    """inv, det, svd: of every matrix by itself; results have the same first dims."""
    return combine(op.linearity, [Term(input, _lead(input))])


def solved(op: Op, input: Operand, other: Operand, **settings: Any) -> TensorType:
    """solve: non-linear in the matrices, linear in the right sides."""
    if other.ndim < 2 or input.ndim < 2 or other.ndim == input.ndim - 1:
        raise Refusal("right sides are known as matrices (..., N, K)", operand=other)
    heads = [replace(x, shape=x.shape[:-2]) for x in (input, other)]
    left, right = broadcast(heads)
    lead = max(len(left), len(right))
    inverse = combine(op.linearity, [Term(input, _lead(input))])
    mixed = Mixed(MATRIX)
    return combine(
        MULTILINEAR,
        [
            Term(inner_value(inverse, input.shape, input), (*left, mixed, mixed)),
            Term(other, (*right, mixed, lead + 1)),
        ],
    )


def multi_dot(op: Op, tensors: Any) -> TensorType:
    """A product of several matrices, one after the other."""
    first, *rest = cast(Sequence[Operand], tensors)
    for other in rest:
        found = matmul(op, first, other)
        shape = (*first.shape[:-1], *other.shape[1:])
        first = inner_value(found, shape, first)
    return first.type


def diagonal(
    op: Op, input: Operand, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> TensorType:
    """The diagonal of two dims, which becomes the last dim."""
    taken = dims_of((dim1, dim2), input.ndim)
    left = [d for d in range(input.ndim) if d not in taken]
    labels: list[Label] = [
        Mixed(DIAGONAL) if d in taken else left.index(d) for d in range(input.ndim)
    ]
    return moved(op, input, labels)


def diagonal_embedded(
    op: Op, input: Operand, offset: int = 0, dim1: int = -2, dim2: int = -1
) -> TensorType:
    """The last dim becomes the diagonal of two new dims."""
    new = dims_of((dim1, dim2), input.ndim + 1)
    left = [d for d in range(input.ndim + 1) if d not in new]
    index = arithmetic_index([input])  # beside the diagonal there are zeros
    return combine(op.linearity, [Term(input, (*left, Mixed(DIAGONAL)))], index=index)


def every_dim(op: Op, input: Operand, **settings: Any) -> TensorType:
    """trace, diag, kron: where an element goes depends on its place in all dims."""
    others = [x for x in settings.values() if isinstance(x, Operand)]
    terms = [Term(x, (Mixed(DIAGONAL),) * x.ndim) for x in (input, *others)]
    return combine(op.linearity, terms)


def tensordot(op: Op, a: Operand, b: Operand, dims: Any = 2) -> TensorType:
    """Dims of one tensor against dims of another; the others stand side by side."""
    if isinstance(dims, int):
        left, right = tuple(range(a.ndim - dims, a.ndim)), tuple(range(dims))
    else:
        left, right = dims_of(dims[0], a.ndim), dims_of(dims[1], b.ndim)
    place = iter(range(a.ndim + b.ndim))
    labels: list[tuple[Label, ...]] = []
    for x, gone in ((a, left), (b, right)):
        own: list[Label] = []
        for d in range(x.ndim):
            own.append(Contract(f"{gone.index(d)}") if d in gone else next(place))
        labels.append(tuple(own))
    return combine(op.linearity, [Term(a, labels[0]), Term(b, labels[1])])


def outer_added(
    op: Op, input: Operand, vec1: Operand, vec2: Operand, beta: Any = 1, alpha: Any = 1
) -> TensorType:
    """addr: input + vec1 * vec2, an outer product."""
    product = combine(op.linearity, [Term(vec1, (0,)), Term(vec2, (1,))])
    return plus(product, (*vec1.shape, *vec2.shape), input, beta)


def products_added(
    op: Op, input: Operand, batch1: Operand, batch2: Operand, beta: Any = 1, alpha: Any = 1
) -> TensorType:
    """addbmm: input + the sum of all products of a batch."""
    batch, inner = Contract("batch"), Contract("inner")
    terms = [Term(batch1, (batch, 0, inner)), Term(batch2, (batch, inner, 1))]
    shape = (batch1.shape[1], batch2.shape[2])
    return plus(combine(op.linearity, terms), shape, input, beta)


def bilinear(
    op: Op, input1: Operand, input2: Operand, weight: Operand, bias: Any = None
) -> TensorType:
    """(..., I) and (..., J) with weight (O, I, J)."""
    rows = tuple(range(input1.ndim - 1))
    terms = [
        Term(input1, (*rows, Contract("1"))),
        Term(input2, (*rows, Contract("2"))),
        Term(weight, (len(rows), Contract("1"), Contract("2"))),
    ]
    shape = (*input1.shape[:-1], weight.shape[0])
    return plus(combine(op.linearity, terms), shape, bias)


def cross(op: Op, input: Operand, other: Operand, dim: Any = None) -> TensorType:
    """cross: along `dim`; without one, along the first dim that has three rows."""
    if dim is None:
        return every_dim(op, input, other=other)
    (along,) = dims_of(dim, max(input.ndim, other.ndim))
    return combine(op.linearity, _but_along(op, [input, other], along, keepdim=True))


def compared(
    op: Op,
    input: Operand,
    other: Operand,
    dim: int = -1,
    keepdim: bool = False,
    **settings: Any,
) -> TensorType:
    """vecdot, distances: of vectors along a dim, which is reduced away."""
    (along,) = dims_of(dim, max(input.ndim, other.ndim))
    return combine(op.linearity, _but_along(op, [input, other], along, keepdim))


def distances(op: Op, input: Operand, other: Operand, **settings: Any) -> TensorType:
    """cdist: (..., P, M) and (..., R, M) -> (..., P, R)."""
    heads = [replace(x, shape=x.shape[:-2]) for x in (input, other)]
    left, right = broadcast(heads)
    lead = max(len(left), len(right))
    mixed = Mixed(MATRIX)
    terms = [Term(input, (*left, lead, mixed)), Term(other, (*right, lead + 1, mixed))]
    return combine(op.linearity, terms)


def _but_along(
    op: Op, operands: Sequence[Operand], along: int, keepdim: bool
) -> list[Term]:
    """Terms that are broadcast together, but for one dim that is looked along."""
    terms: list[Term] = []
    for term in terms_of(operands):
        labels: list[Label] = []
        for label in term.labels:
            if label == along:
                labels.append(op.along_label(f"along {along}"))
            elif isinstance(label, int) and label > along and not keepdim:
                labels.append(label - 1)
            else:
                labels.append(label)
        terms.append(Term(term.operand, tuple(labels)))
    return terms
