"""Flows of ops that work element by element."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.broadcast import adds, arithmetic_index, is_number, terms_of
from placements.inference.flows.indexing import nonzero
from placements.inference.numbers import NUMBER
from placements.inference.op import Op
from placements.inference.rules import LINEAR, NONLINEAR, Linearity
from placements.inference.sizes import filled_anew
from placements.inference.terms import Operand, Refusal, Term
from placements.types.axis import P, V
from placements.types.index import COMPUTED, Computed, Index
from placements.types.tensor import FILLED, ZERO, TensorType, make


def pointwise(op: Op, **slots: Any) -> TensorType:
    """Every tensor is a value."""
    values = list(slots.values())
    operands = [value for value in values if isinstance(value, Operand)]
    terms = terms_of(operands)
    return combine(
        op.linearity,
        terms,
        index=arithmetic_index(operands),
        at_pads=padding.elementwise(op.zeros, terms, values),
    )


def compared(op: Op, input: Any, other: Any) -> TensorType:
    """A comparison; none or all of a piece's own rows is each rank's own answer.

    A count of a cut dim is pending a sum. Whether it is zero, or as large as the piece,
    can be asked of the rank's own summand, and what that says of the whole nobody claims.
    """
    if not isinstance(input, Operand) or input.can_have_gradient or not op.forgets:
        return pointwise(op, input=input, other=other)
    pending = [axis for axis, t in input.type.items() if t.letter == "P"]
    if isinstance(other, Operand) and other.dtype == NUMBER:
        sizes = other.type.by_axis
        pending = [axis for axis in pending if axis in sizes and sizes[axis] == P]
        other = _as_own(other, pending)
    elif other.__class__ is not int or other != 0:
        pending = []
    return pointwise(op, input=_as_own(input, pending), other=other)


def _as_own(operand: Operand, axes: Sequence[str]) -> Operand:
    """The operand as each rank's own on these axes."""
    found = operand.type
    types = {axis: V if axis in axes else t for axis, t in found.items()}
    own = make(found.mesh, types, found.index, found.fresh).with_pads(found.pads)
    return replace(operand, type=own)


def by_channel(op: Op, input: Operand, weight: Operand) -> TensorType:
    """prelu: one number of the weight for each row of dim 1, or one for all."""
    channel = () if not weight.ndim else (None if weight.is_one_row(0) else 1,)
    terms = [Term(input, tuple(range(input.ndim))), Term(weight, channel)]
    return combine(op.linearity, terms)


def added(op: Op, input: Any, other: Any, alpha: Any = 1) -> TensorType:
    """input + alpha * other: a number is a term like any other."""
    operands = [value for value in (input, other) if isinstance(value, Operand)]
    return combine(
        op.linearity,
        terms_of(operands),
        index=arithmetic_index(operands),
        adds_number=op.linearity is LINEAR and adds(input, other),
    )


def multiplied(op: Op, input: Any, other: Any) -> TensorType:
    operands = [value for value in (input, other) if isinstance(value, Operand)]
    return combine(op.linearity, terms_of(operands), index=arithmetic_index(operands))


def quotient(op: Op, input: Any, other: Any, rounding_mode: Any = None) -> TensorType:
    """Linear in the numerator, for a given divisor."""
    linearity = op.linearity if rounding_mode is None else NONLINEAR
    if not isinstance(input, Operand):
        linearity = NONLINEAR
    values = [input] if isinstance(input, Operand) else []
    divisors = [other] if isinstance(other, Operand) else []
    if not values:
        values, divisors = divisors, []
    found = combine(
        linearity,
        terms_of(values, divisors),
        index=arithmetic_index([*values, *divisors]),
        at_pads=padding.divided(linearity, divisors),
    )
    return found if rounding_mode is None else _counting_runs(found, input, other)


def floor_divided(op: Op, input: Any, other: Any) -> TensorType:
    """input // other: an index of rows that is divided counts runs of rows."""
    return _counting_runs(pointwise(op, input=input, other=other), input, other)


def _counting_runs(found: TensorType, input: Any, other: Any) -> TensorType:
    domain = input.type.index if isinstance(input, Operand) else None
    if not isinstance(domain, Index) or type(other) is not int or other < 1:
        return found
    return found.with_index(Computed(domain.divided(other)))


def product_added(
    op: Op, input: Any, tensor1: Any, tensor2: Any, value: Any = 1
) -> TensorType:
    """addcmul: input + value * tensor1 * tensor2."""
    factors = [x for x in (tensor1, tensor2, value) if isinstance(x, Operand)]
    return _plus_scaled(input, factors, combine(op.linearity, terms_of(factors)))


def quotient_added(
    op: Op, input: Any, tensor1: Any, tensor2: Any, value: Any = 1
) -> TensorType:
    """addcdiv: input + value * tensor1 / tensor2."""
    others = [x for x in (tensor2, value) if isinstance(x, Operand)]
    found = combine(
        op.linearity, terms_of([tensor1], others), at_pads=padding.divided(LINEAR, others)
    )
    return _plus_scaled(input, [tensor1, *others], found)


def _plus_scaled(
    input: Operand, factors: Sequence[Operand], found: TensorType
) -> TensorType:
    """The type of input + a product of the factors, which has that type."""
    ndim = max(x.ndim for x in factors)
    shapes = [(1,) * (ndim - x.ndim) + x.shape for x in factors]
    shape = tuple(max(sizes, key=lambda n: n != 1) for sizes in zip(*shapes, strict=True))
    product = Operand(found, shape, input.dtype, factors[0].position)
    both = [input, product]
    return combine(LINEAR, terms_of(both), index=arithmetic_index(both))


def where(op: Op, condition: Operand, input: Any = None, other: Any = None) -> Any:
    """Linear in the two branches, for a given condition; alone, where it is not zero."""
    if input is None and other is None:
        return nonzero(replace(op, linearity=NONLINEAR), condition, as_tuple=True)
    if input is None or other is None:
        raise Refusal("where takes two branches, or none")
    branches = (input, other)
    values = [b for b in branches if isinstance(b, Operand)]
    numbers = [b for b in branches if is_number(b)]
    indices = {o.type.index for o in values}
    return combine(
        op.linearity,
        terms_of(values, [condition]),
        index=indices.pop()
        if len(indices) == 1 and not numbers
        else arithmetic_index(values),
        adds_number=adds(*numbers),
        at_pads=padding.chosen(*branches),
    )


def lerp(op: Op, input: Operand, end: Operand, weight: Any) -> TensorType:
    """Linear in both ends, for a given weight."""
    weights = [weight] if isinstance(weight, Operand) else []
    return combine(op.linearity, terms_of([input, end], weights))


def masked_fill(op: Op, input: Operand, mask: Operand, value: Any) -> TensorType:
    values = [o for o in (input, value) if isinstance(o, Operand)]
    filled = value if isinstance(value, Operand) else input
    # What is filled in need not be a row of this rank, as for `where`.
    same = len(values) == 2 and values[0].type.index == values[1].type.index
    return combine(
        linearity_to(op, filled, input.dtype),
        terms_of(values, [mask]),
        index=input.type.index if same else arithmetic_index(values),
        adds_number=adds(value),
        at_pads=padding.filled(input, value),
    )


_WHOLE = ("int", "uint", "bool", "long", "short", "char", "byte")


def _word(dtype: object) -> str:
    """`int64` for torch.int64, and `long` for torch.LongTensor, which stands for it."""
    return str(dtype).rpartition(".")[2].strip("'>").lower().removesuffix("tensor")


def rounded(input: Operand, dtype: object) -> bool:
    """Whether each element is rounded on the way to a dtype: a sum would not be."""
    return input.can_have_gradient and _word(dtype).startswith(_WHOLE)


def _wraps(input: Operand, dtype: object) -> bool:
    """Whether a dtype is so small that a sum of casts is not the cast of the sum."""
    is_small = _word(dtype).startswith(("bool", "uint8", "byte"))
    return is_small and _word(dtype) != input.dtype


# What holds the number of any row as it is.
_HOLDS_ROWS = ("int64", "int32", "float64", "long", "int", "double")


def _holds_rows(dtype: object) -> bool:
    """Whether a cast to a dtype (None: to the same one) leaves an index as it is."""
    return dtype is None or _word(dtype) in _HOLDS_ROWS


def linearity_to(op: Op, input: Operand, dtype: object) -> Linearity:
    changes = rounded(input, dtype) or _wraps(input, dtype)
    return NONLINEAR if changes else op.linearity


def to_dtype(op: Op, input: Operand, dtype: Any = None, other: Any = None) -> TensorType:
    """The same values in another dtype, device or layout."""
    target = other.dtype if isinstance(other, Operand) else dtype
    linearity, rounds = linearity_to(op, input, target), rounded(input, target)
    return _cast(linearity, input, rounds, holds_rows=_holds_rows(target))


def to_whole(op: Op, input: Operand, *, holds_rows: bool) -> TensorType:
    """long and its kin: a value is rounded; small dtypes cannot number all rows."""
    rounds = input.can_have_gradient
    linearity = NONLINEAR if rounds else op.linearity
    return _cast(linearity, input, rounds, holds_rows=holds_rows)


def to_bool(op: Op, input: Operand) -> TensorType:
    return _cast(op.linearity, input, input.can_have_gradient, holds_rows=False)


def to_float(op: Op, input: Operand) -> TensorType:
    """float and its kin: numbers of rows become numbers, which may be rounded."""
    return combine(op.linearity, [Term(input, tuple(range(input.ndim)))])


def _cast(
    linearity: Linearity, input: Operand, rounds: bool, *, holds_rows: bool
) -> TensorType:
    index = COMPUTED if rounds else input.type.index
    if isinstance(index, Index) and not holds_rows:
        index = COMPUTED
    labels = tuple(range(input.ndim))
    return combine(linearity, [Term(input, labels)], index=index, at_pads=padding.cast)


def same(op: Op, input: Operand) -> TensorType:
    """The same elements in the same places."""
    labels = tuple(range(input.ndim))
    return combine(op.linearity, [Term(input, labels)], index=input.type.index)


def each(op: Op, input: Operand) -> TensorType:
    """Another number in the place of each, so that an index is one no longer."""
    index = arithmetic_index([input])
    return combine(op.linearity, [Term(input, tuple(range(input.ndim)))], index=index)


def copy(op: Op, input: Operand, src: Any) -> TensorType:
    """The target takes the values of the source, so it must be of the source's type."""
    if not isinstance(src, Operand):
        return fill(op, input, src)
    terms = terms_of([input, src])
    shift = input.ndim - src.ndim
    for dim, size in enumerate(src.shape):
        # All ranks refuse, also those whose own piece has as many rows as the target.
        cuts = src.type.cuts(dim)
        alike = cuts == input.type.cuts(dim + shift)
        repeats = size == 1 != input.shape[dim + shift]
        repeats_elsewhere = any(1 in e.sizes and not e.equal_sizes for _, e in cuts)
        if cuts and (repeats or (repeats_elsewhere and not alike)):
            raise Refusal(
                "one row of a piece would be repeated over the rows of the target",
                src.cut_axes(dim)[0], src, "a source of the target's shape",
            )  # fmt: skip
    if input.type.fresh is not None:
        # What it held does not matter, but a buffer in the sizes of a piece is a piece.
        shape = [replace(terms[0], is_control=True)] if input.type.cut_dims else []
        terms = [*terms[1:], *shape]
    return combine(linearity_to(op, src, input.dtype), terms, index=src.type.index)


def fill(op: Op, input: Operand, value: Any = 0) -> TensorType:
    """Every element becomes one number."""
    if input.type.fresh is not None and not isinstance(value, Operand):
        return filled_anew(input, FILLED if value else ZERO)
    values = [input, value] if isinstance(value, Operand) else [input]
    filled = values[-1]
    return combine(
        linearity_to(op, filled, input.dtype), terms_of(values), adds_number=adds(value)
    )


def one_hot(op: Op, input: Operand, num_classes: int = -1) -> TensorType:
    ids_differ = any(t.letter not in "RI" for t in input.type.types) or input.type.pads
    if num_classes < 0 and ids_differ:
        raise Refusal(
            "without num_classes= the width depends on the largest id of each piece, or on "
            "the ids of rows of padding",
            operand=input,
            expected="one_hot(ids, num_classes=E)",
        )
    labels = tuple(range(input.ndim))
    return combine(op.linearity, [Term(input, labels)], index=COMPUTED)
