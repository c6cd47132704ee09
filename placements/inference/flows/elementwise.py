"""Flows of ops that work element by element, along one dim, or reduce dims."""

from collections.abc import Sequence
from typing import Any, cast

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.op import Op
from placements.inference.rules import LINEAR, NONLINEAR, Linearity
from placements.inference.terms import SHAPES, Label, Mixed, Operand, Refusal, Term
from placements.types.index import COMPUTED, Computed, Index
from placements.types.tensor import FILLED, ZERO, TensorType, from_factory


def broadcast(operands: Sequence[Operand]) -> list[tuple[Label, ...]]:
    """Labels of operands that are broadcast together, dims aligned from the right.

    A dim of one row is broadcast only if that is all of it.
    """
    ndim = max(operand.ndim for operand in operands)
    labels: list[tuple[Label, ...]] = []
    for operand in operands:
        shift = ndim - operand.ndim
        labels.append(
            tuple(
                None if operand.is_one_row(dim) else dim + shift
                for dim in range(operand.ndim)
            )
        )
    _check_sizes(operands, labels)
    return labels


def _check_sizes(operands: Sequence[Operand], labels: Sequence[tuple[Label, ...]]) -> None:
    # Where a dim is cut the rules know better why the sizes differ.
    cut: set[Label] = set()
    sizes: dict[Label, int] = {}
    clash: list[Label] = []
    for operand, own in zip(operands, labels, strict=True):
        for dim, (label, size) in enumerate(zip(own, operand.shape, strict=True)):
            if operand.cut_axes(dim):
                cut.add(label)
            if label is not None and sizes.setdefault(label, size) != size:
                clash.append(label)
    if set(clash) - cut:
        raise Refusal("the shapes do not broadcast", kind=SHAPES)


def terms_of(operands: Sequence[Operand], controls: Sequence[Operand] = ()) -> list[Term]:
    """Terms of operands that are broadcast together; `controls` carry no values."""
    every = [*operands, *controls]
    return [
        Term(operand, labels, is_control=place >= len(operands))
        for place, (operand, labels) in enumerate(zip(every, broadcast(every), strict=True))
    ]


def arithmetic_index(operands: Sequence[Operand]) -> Computed | None:
    """Integers out of arithmetic count nothing until somebody says what."""
    return None if any(o.can_have_gradient for o in operands) else COMPUTED


def is_number(value: object) -> bool:
    return isinstance(value, int | float | complex)


def pointwise(op: Op, *args: Any, **kwargs: Any) -> TensorType:
    """Every tensor argument is a value; numbers count in sums."""
    every = [*args, *kwargs.values()]
    operands = [a for a in every if isinstance(a, Operand)]
    numbers = [*args, kwargs.get("other", 0)]
    adds = op.linearity is LINEAR and any(is_number(a) and a != 0 for a in numbers)
    terms = terms_of(operands)
    return combine(
        op.linearity,
        terms,
        index=arithmetic_index(operands),
        adds_number=adds,
        at_pads=padding.elementwise(op.name, terms, every),
    )


def quotient(op: Op, input: Any, other: Any, **kwargs: Any) -> TensorType:
    """Linear in the numerator, for a given divisor."""
    exact = kwargs.get("rounding_mode") is None
    linearity = op.linearity if exact else NONLINEAR
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


def where(op: Op, condition: Operand, *branches: Any, **kwargs: Any) -> Any:
    """Linear in the two branches, for a given condition."""
    branches = (*branches, *kwargs.values())
    if not branches:
        raise Refusal("where(condition) alone returns rows whose number depends on data")
    values = [b for b in branches if isinstance(b, Operand)]
    numbers = [b for b in branches if is_number(b)]
    indices = {o.type.index for o in values}
    return combine(
        op.linearity,
        terms_of(values, [condition]),
        index=indices.pop()
        if len(indices) == 1 and not numbers
        else arithmetic_index(values),
        adds_number=any(n != 0 for n in numbers),
        at_pads=padding.chosen(*branches),
    )


def lerp(op: Op, input: Operand, end: Operand, weight: Any) -> TensorType:
    """Linear in both ends, for a given weight."""
    weights = [weight] if isinstance(weight, Operand) else []
    return combine(op.linearity, terms_of([input, end], weights))


def masked_fill(op: Op, input: Operand, mask: Operand, value: Any) -> TensorType:
    values = [o for o in (input, value) if isinstance(o, Operand)]
    return combine(
        op.linearity,
        terms_of(values, [mask]),
        index=input.type.index,
        adds_number=is_number(value) and value != 0,
        at_pads=padding.filled(input, value),
    )


_WHOLE = ("int", "uint", "bool", "long", "short", "char", "byte")


def rounded(input: Operand, dtype: object) -> bool:
    """Whether each element is rounded on the way to a dtype: a sum would not be."""
    return input.can_have_gradient and str(dtype).removeprefix("torch.").startswith(_WHOLE)


def linearity_to(op: Op, input: Operand, dtype: object) -> Linearity:
    return NONLINEAR if rounded(input, dtype) else op.linearity


def to_dtype(op: Op, input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """The same values in another dtype, device or layout."""
    every = [*args, *kwargs.values(), op.name]
    targets = [str(a).removeprefix("torch.") for a in every if not isinstance(a, Operand)]
    targets += [a.dtype for a in every if isinstance(a, Operand)]
    rounds = any(rounded(input, target) for target in targets)
    labels = tuple(range(input.ndim))
    return combine(
        NONLINEAR if rounds or "bool" in targets else op.linearity,
        [Term(input, labels)],
        index=COMPUTED if rounds else input.type.index,
        at_pads=padding.cast,
    )


def same(op: Op, input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """The same elements in the same places."""
    labels = tuple(range(input.ndim))
    return combine(op.linearity, [Term(input, labels)], index=input.type.index)


def copy(op: Op, input: Operand, source: Operand, *args: Any) -> TensorType:
    """The target takes the values of the source, so it must be of the source's type."""
    terms = terms_of([input, source])
    shift = input.ndim - source.ndim
    for dim, size in enumerate(source.shape):
        if source.cut_axes(dim) and size != input.shape[dim + shift]:
            raise Refusal(
                "one row of a piece would be repeated over the rows of the target",
                source.cut_axes(dim)[0], source, "a source of the target's shape",
            )  # fmt: skip
    if input.type.fresh is not None:
        terms = terms[1:]
    linearity = linearity_to(op, source, input.dtype)
    return combine(linearity, terms, index=source.type.index)


def fill(op: Op, input: Operand, value: Any = 0) -> TensorType:
    """Every element becomes one number."""
    if input.type.fresh is not None and not isinstance(value, Operand):
        return from_factory(input.type.mesh, FILLED if value else ZERO)
    values = [input, value] if isinstance(value, Operand) else [input]
    return combine(
        op.linearity, terms_of(values), adds_number=is_number(value) and value != 0
    )


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that an argument names, counted from the front; None names all."""
    if dim is None or dim == () or dim == []:
        return tuple(range(ndim))
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % ndim if ndim else 0 for d in given)


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


def _reduction_arguments(
    op: Op, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, bool]:
    """(dim, keepdim) of a reduction, however they were passed."""
    dim: Any = kwargs.get("dim")
    keepdim = bool(kwargs.get("keepdim", False))
    unbiased_first = op.name in ("var", "std", "var_mean", "std_mean")
    for arg in args:
        if isinstance(arg, bool):
            keepdim, unbiased_first = (keepdim, False) if unbiased_first else (arg, False)
        elif isinstance(arg, int | tuple | list):
            dim = cast(Any, arg)
    return dim, keepdim


def reduction(op: Op, input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """Dims are reduced away."""
    dim, keepdim = _reduction_arguments(op, args, kwargs)
    dims = dims_of(dim, input.ndim)
    labels = reduced_labels(op, input, dims, keepdim)
    linearity = linearity_to(op, input, kwargs.get("dtype"))
    at_pads = padding.averaged(input, dims) if op.name == "mean" else None
    index = arithmetic_index([input])
    return combine(linearity, [Term(input, labels)], index=index, at_pads=at_pads)


def norm(op: Op, input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """A reduction whose first argument is the order of the norm."""
    return reduction(op, input, *args[1:], **kwargs)


def choice(op: Op, input: Operand, *args: Any, **kwargs: Any) -> Any:
    """max, min, ...: elementwise with a second tensor, else a reduction that chooses.

    Along a dim it returns values and the rows they came from.
    """
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Operand):
        both = [input, other]
        return combine(op.linearity, terms_of(both), index=arithmetic_index(both))
    values = reduction(op, input, *args, **kwargs).with_index(input.type.index)
    dim, _ = _reduction_arguments(op, args, kwargs)
    if dim is None:
        return values
    return values, values.with_index(rows_of(input, dim))


def position(op: Op, input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """argmax, argmin: the row that was chosen."""
    dim, _ = _reduction_arguments(op, args, kwargs)
    chosen = reduction(op, input, *args, **kwargs)
    return chosen.with_index(rows_of(input, dim))


def rows_of(input: Operand, dim: int | None) -> Index:
    """The domain of an index into a dim that is not cut (or into all elements)."""
    if dim is None:
        size = 1
        for length in input.shape:
            size *= length
        return Index(size)
    return Index(input.shape[dim % input.ndim] if input.ndim else 1)


def along(op: Op, input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """Same shape; every element depends on the others along one dim."""
    dim = kwargs.get("dim", args[0] if args else None)
    linearity = linearity_to(op, input, kwargs.get("dtype"))
    return combine(linearity, [_along_term(op, input, dim)], index=input.type.index)


def normalize(
    op: Op, input: Operand, p: float = 2.0, dim: Any = 1, *args: Any, **kwargs: Any
) -> TensorType:
    """As softmax; the order of the norm comes before the dim."""
    return along(op, input, dim)


def flip(op: Op, input: Operand, *dims: Any, **kwargs: Any) -> TensorType:
    """flip(x, 0, 1) and flip(x, (0, 1)) alike."""
    named = kwargs.get("dims", dims[0] if len(dims) == 1 else dims)
    return along(op, input, named)


def roll(op: Op, input: Operand, shifts: Any, dims: Any = None) -> TensorType:
    """Without dims the elements move in the flattened tensor."""
    return along(op, input, dims)


def running_choice(op: Op, input: Operand, dim: int) -> Any:
    """cummax, cummin: values so far and the rows they came from, in the input's shape."""
    values = along(op, input, dim)
    return values, values.with_index(rows_of(input, dim))


def _along_term(op: Op, input: Operand, dim: Any) -> Term:
    mixed = dims_of(dim, input.ndim)
    labels = tuple(
        op.along_label(f"along {d}") if d in mixed else d for d in range(input.ndim)
    )
    return Term(input, labels)


def ordering(op: Op, input: Operand, *args: Any, **kwargs: Any) -> Any:
    """sort, argsort, topk, ...: values and the rows they came from, along one dim."""
    if op.name == "msort":
        return combine(op.linearity, [_along_term(op, input, 0)], index=input.type.index)
    rest = list(args)
    if op.name == "topk":
        rest = rest[1:]
    dims = [a for a in rest if isinstance(a, int) and not isinstance(a, bool)]
    dim = kwargs.get("dim", dims[0] if dims else -1)
    values = combine(op.linearity, [_along_term(op, input, dim)], index=input.type.index)
    order = values.with_index(rows_of(input, dim))
    return order if op.name == "argsort" else (values, order)


def kthvalue(op: Op, input: Operand, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """A value and its row; the dim is reduced away."""
    values = reduction(op, input, dim, keepdim).with_index(input.type.index)
    return values, values.with_index(rows_of(input, dim))


def count(op: Op, input: Operand, *args: Any, **kwargs: Any) -> TensorType:
    """bincount, histc: how often each value occurs; the counts of pieces add up."""
    weights = kwargs.get("weights", args[0] if op.name == "bincount" and args else None)
    length_is_data = (
        kwargs.get("minlength", args[1] if len(args) > 1 else 0) == 0
        if op.name == "bincount"
        else kwargs.get("min", args[1] if len(args) > 1 else 0)
        == kwargs.get("max", args[2] if len(args) > 2 else 0)
    )
    label = op.along_label("counted")
    if length_is_data:
        label = Mixed(
            "the bins depend on the data of each piece; "
            "give minlength= (bincount) or min= and max= (histc)"
        )
    terms = [Term(input, (label,) * input.ndim, is_control=True)]
    if isinstance(weights, Operand):
        terms.append(Term(weights, (label,) * weights.ndim))
    return combine(op.linearity, terms, index=COMPUTED)


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
