"""Flows of norms and losses: composed ops whose inner dims must be whole."""

from collections.abc import Mapping, Sequence
from typing import Any

from placements.inference import padding
from placements.inference.combine import combine
from placements.inference.fixes import Fix, cost
from placements.inference.flows.broadcast import broadcast
from placements.inference.flows.products import inner_value
from placements.inference.op import Op
from placements.inference.rules import LINEAR, MULTILINEAR
from placements.inference.sizes import sizes_of
from placements.inference.terms import Contract, Label, Mixed, Operand, Refusal, Term
from placements.inference.transitions import find
from placements.types.axis import I, P
from placements.types.tensor import TensorType

NORMALISED = "a norm needs the whole dim: the statistics of a piece are not those of all"
CLASSES = "a loss needs the scores of all classes, and this rank holds a piece of them"
VECTORS = "a distance needs whole vectors, and this rank holds a piece of each"
MEAN = (
    "a mean over a dim that is cut divides by this rank's count; sum, and divide by the "
    "global count (reduction='sum' and global_mean)"
)


def normalised(
    op: Op,
    input: Operand,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = None,
) -> TensorType:
    """layer_norm, rms_norm over the last dims; a weight is a factor, a bias a term."""
    first = input.ndim - len(sizes_of(normalized_shape))
    labels = [d if d < first else Mixed(NORMALISED) for d in range(input.ndim)]
    result = combine(op.linearity, [Term(input, tuple(labels))])
    return scaled(result, input, weight, bias, Mixed(NORMALISED))


def scaled(
    result: TensorType, input: Operand, weight: Any, bias: Any, label: Label
) -> TensorType:
    """A norm of the input, then a factor and a term whose dims have that label."""
    every = tuple(range(input.ndim))
    for extra, linearity in ((weight, MULTILINEAR), (bias, LINEAR)):
        if isinstance(extra, Operand):
            whole = Term(inner_value(result, input.shape, input), every)
            result = combine(linearity, [whole, Term(extra, (label,) * extra.ndim)])
    return result


def _refuse_legacy(*flags: Any) -> None:
    if any(flag is not None for flag in flags):
        raise Refusal("size_average and reduce are deprecated by torch: use reduction=")


def _reduced(reduction: str, place: int, key: str) -> Label:
    if reduction == "none":
        return place
    return Contract(key) if reduction == "sum" else Mixed(MEAN)


def cross_entropy(
    op: Op,
    input: Operand,
    target: Operand,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> TensorType:
    """cross_entropy, nll_loss: classes in dim 1 (dim 0 of an unbatched input).

    Targets that are probabilities are a factor of the log-probabilities, unless smoothing
    adds a number to them.
    """
    _refuse_legacy(size_average, reduce)
    classes = 1 if input.ndim > 1 else 0
    if reduction != "none" and target.ndim < input.ndim:
        input, target = padding.ignored(input, target, classes, ignore_index)
    labels: list[Label] = []
    for d in range(input.ndim):
        place = d - (d > classes)
        labels.append(
            Mixed(CLASSES) if d == classes else _reduced(reduction, place, f"row {place}")
        )
    if target.ndim == input.ndim:
        rows = tuple(labels)
    else:
        rows = tuple(_reduced(reduction, d, f"row {d}") for d in range(target.ndim))
    is_factor = target.can_have_gradient and not label_smoothing
    linearity = MULTILINEAR if is_factor else op.linearity
    if is_factor:
        kept = tuple(Mixed(CLASSES) if d == classes else d for d in range(input.ndim))
        scores = combine(op.linearity, [Term(input, kept)])
        input = inner_value(scores, input.shape, input)
    terms = [
        Term(input, tuple(labels)),
        Term(target, rows, is_control=not target.can_have_gradient),
    ]
    if isinstance(weight, Operand):
        terms.append(Term(weight, (Mixed(CLASSES),), is_control=True))
    return combine(linearity, terms)


def elementwise_loss(
    op: Op,
    reduction: str = "mean",
    size_average: Any = None,
    reduce: Any = None,
    **slots: Any,
) -> TensorType:
    """mse_loss and its kin: elementwise, then all dims reduced."""
    _refuse_legacy(size_average, reduce)
    every = [x for x in slots.values() if isinstance(x, Operand)]
    terms: list[Term] = []
    for operand, labels in zip(every, broadcast(every), strict=True):
        reduced = tuple(
            _reduced(reduction, label, f"element {label}")
            if isinstance(label, int)
            else label
            for label in labels
        )
        terms.append(Term(operand, reduced))
    return combine(op.linearity, terms)


def row_loss(
    op: Op,
    reduction: str = "mean",
    size_average: Any = None,
    reduce: Any = None,
    **slots: Any,
) -> TensorType:
    """cosine_embedding_loss and its kin: one number for each row of the last dim."""
    _refuse_legacy(size_average, reduce)
    vectors = [x for x in slots.values() if isinstance(x, Operand)]
    rows = max(x.ndim for x in vectors) - 1
    terms: list[Term] = []
    for x, labels in zip(vectors, broadcast(vectors), strict=True):
        own: list[Label] = []
        for label in labels:
            if not isinstance(label, int):
                own.append(label)
            elif label == rows:
                own.append(Mixed(VECTORS))
            else:
                own.append(_reduced(reduction, label, f"row {label}"))
        terms.append(Term(x, tuple(own)))
    return combine(op.linearity, terms)


def mean_fix(
    op: str,
    total: TensorType,
    operands: Sequence[Operand],
    names: Sequence[str],
    plain: Mapping[str, object],
    said: Mapping[str, object],
) -> list[Fix]:
    """For a mean loss over rows that are cut: the sum of all over the count of all.

    `total` is the type of the sum, `plain` the settings of the call, and `said` those of
    them that have to be written.
    """
    if len(operands) != 2:
        return []  # torch divides by the sum of the weights
    loss, target = operands
    axes = [axis for axis, t in total.items() if t.letter == "P"]
    whole = [axis for axis in total if axis not in axes]
    if any(loss.type[axis].letter != target.type[axis].letter for axis in whole):
        return []
    if "ignore_index" in plain:
        if target.ndim == loss.ndim:
            return []  # probabilities of classes: torch divides by the number of rows
        count = f"({names[1]} != {plain['ignore_index']}).sum()"
    elif loss.shape == target.shape:
        count = f"torch.full((), {names[1]}.numel())"
    else:
        return []
    settings = ", ".join(f"{slot}={value!r}" for slot, value in said.items())
    text = f"F.{op}({names[0]}, {names[1]}, {settings})"
    row = find("all_reduce", P, I)
    assert row is not None
    costs = [cost(row, axis) for axis in axes]
    forward, backward = (", ".join(dict.fromkeys(s)) for s in zip(*costs, strict=True))
    over = repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
    return [Fix(f"global_mean({text}, {count}, {over})", forward, backward)]
