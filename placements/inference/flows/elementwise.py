"""Flows of ops that work element by element."""

from dataclasses import replace
from typing import Any

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.flows.broadcast import adds, arithmetic_index, is_number, terms_of
from placements.inference.op import Op
from placements.inference.rules import LINEAR, NONLINEAR, Linearity
from placements.inference.sizes import Size, sizes_of, type_of_sizes
from placements.inference.terms import Operand, Refusal, Term
from placements.types.index import COMPUTED
from placements.types.tensor import EMPTY, FILLED, ZERO, TensorType


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
    return combine(
        linearity,
        terms_of(values, divisors),
        index=arithmetic_index([*values, *divisors]),
        at_pads=padding.divided(linearity, divisors),
    )


def where(op: Op, condition: Operand, input: Any = None, other: Any = None) -> TensorType:
    """Linear in the two branches, for a given condition."""
    if input is None or other is None:
        raise Refusal("where(condition) alone returns rows whose number depends on data")
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
    return combine(
        linearity_to(op, filled, input.dtype),
        terms_of(values, [mask]),
        index=input.type.index,
        adds_number=adds(value),
        at_pads=padding.filled(input, value),
    )


_WHOLE = ("int", "uint", "bool", "long", "short", "char", "byte")


def _is_whole(dtype: object) -> bool:
    """Whether a dtype holds whole numbers; `torch.LongTensor` stands for one, too."""
    text = str(dtype).rpartition(".")[2].strip("'>").lower()
    return text.startswith(_WHOLE)


def rounded(input: Operand, dtype: object) -> bool:
    """Whether each element is rounded on the way to a dtype: a sum would not be."""
    return input.can_have_gradient and _is_whole(dtype)


def _wraps(input: Operand, dtype: object) -> bool:
    """Whether a dtype is so small that a sum of casts is not the cast of the sum."""
    text = str(dtype).rpartition(".")[2].strip("'>").lower()
    small = text.startswith(("bool", "uint8", "byte"))
    return small and text.removesuffix("tensor") != input.dtype


def linearity_to(op: Op, input: Operand, dtype: object) -> Linearity:
    changes = rounded(input, dtype) or _wraps(input, dtype)
    return NONLINEAR if changes else op.linearity


def to_dtype(op: Op, input: Operand, dtype: Any = None, other: Any = None) -> TensorType:
    """The same values in another dtype, device or layout."""
    target = other.dtype if isinstance(other, Operand) else dtype
    return _cast(linearity_to(op, input, target), input, rounded(input, target))


def to_whole(op: Op, input: Operand) -> TensorType:
    """long and its kin: a value is rounded on the way."""
    rounds = input.can_have_gradient
    return _cast(NONLINEAR if rounds else op.linearity, input, rounds)


def to_bool(op: Op, input: Operand) -> TensorType:
    return _cast(op.linearity, input, input.can_have_gradient)


def _cast(linearity: Linearity, input: Operand, rounds: bool) -> TensorType:
    return combine(
        linearity,
        [Term(input, tuple(range(input.ndim)))],
        index=COMPUTED if rounds else input.type.index,
        at_pads=padding.cast,
    )


def same(op: Op, input: Operand) -> TensorType:
    """The same elements in the same places."""
    labels = tuple(range(input.ndim))
    return combine(op.linearity, [Term(input, labels)], index=input.type.index)


def copy(op: Op, input: Operand, src: Operand) -> TensorType:
    """The target takes the values of the source, so it must be of the source's type."""
    terms = terms_of([input, src])
    shift = input.ndim - src.ndim
    for dim, size in enumerate(src.shape):
        if src.cut_axes(dim) and size != input.shape[dim + shift]:
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
        return _filled_anew(input, FILLED if value else ZERO)
    values = [input, value] if isinstance(value, Operand) else [input]
    filled = values[-1]
    return combine(
        linearity_to(op, filled, input.dtype), terms_of(values), adds_number=adds(value)
    )


def _filled_anew(input: Operand, fill: str) -> TensorType:
    """The type of a factory's tensor that one number fills: that of its sizes."""
    sizes = sizes_of(input)
    if input.type.fresh == EMPTY:  # it differed by rank in what it held, not in its sizes
        sizes = [Size(size.rows, size.cuts) for size in sizes]
    return type_of_sizes(input.type.mesh, sizes, fill)


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
