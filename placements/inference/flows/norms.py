"""Flows of norms over other dims than the last: of batches, groups and instances."""

from typing import Any

from placements.inference.combine import combine
from placements.inference.flows.losses import NORMALISED, scaled
from placements.inference.flows.products import inner_value
from placements.inference.op import Op
from placements.inference.rules import LINEAR, MULTILINEAR
from placements.inference.terms import Label, Mixed, Operand, Refusal, Term
from placements.types.tensor import TensorType

OF_BATCH = (
    "in training the statistics are those of the whole batch, and this rank holds a piece "
    "of it; use a norm of each sample (group_norm, layer_norm), or statistics that are "
    "given (eval mode)"
)
RUNNING = (
    "in training the running statistics become a mean with those of this batch, which are "
    "of another type"
)


def with_statistics(
    op: Op,
    input: Operand,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    *,
    training: bool,
    kept: int,
    **settings: Any,
) -> TensorType:
    """batch_norm, instance_norm: statistics of every channel, which is in dim 1, or given.

    They are taken over all dims but the `kept` ones: the channels, or samples and channels.
    """
    if not training:
        return _with_given(input, running_mean, running_var, weight, bias)
    of_channels = tuple(0 if d == 1 else Mixed(OF_BATCH) for d in range(input.ndim))
    for old in (running_mean, running_var):
        if isinstance(old, Operand):
            _check_running(op, input, old, of_channels)
    label = Mixed(OF_BATCH) if kept == 1 else Mixed(NORMALISED)
    labels = [d if 2 - kept <= d < 2 else label for d in range(input.ndim)]
    result = combine(op.linearity, [Term(input, tuple(labels))])
    return scaled(result, input, weight, bias, 1)


def group_norm(
    op: Op, input: Operand, weight: Any = None, bias: Any = None, **settings: Any
) -> TensorType:
    """Statistics of every group of channels of every sample."""
    labels = [d if d < 1 else Mixed(NORMALISED) for d in range(input.ndim)]
    result = combine(op.linearity, [Term(input, tuple(labels))])
    return scaled(result, input, weight, bias, Mixed(NORMALISED))


def _with_given(input: Operand, mean: Any, var: Any, weight: Any, bias: Any) -> TensorType:
    """(input - mean) / sqrt(var): linear, for a given divisor."""
    terms = [Term(input, tuple(range(input.ndim)))]
    terms += [Term(x, (1,)) for x in (mean,) if isinstance(x, Operand)]
    terms += [Term(x, (1,), is_control=True) for x in (var,) if isinstance(x, Operand)]
    return scaled(combine(LINEAR, terms), input, weight, bias, 1)


def _check_running(
    op: Op, input: Operand, old: Operand, of_channels: tuple[Label, ...]
) -> None:
    """Refuse running statistics, which are written, of another type than the new ones."""
    new = combine(op.linearity, [Term(input, of_channels)])
    mean = combine(
        LINEAR, [Term(old, (0,)), Term(inner_value(new, old.shape, input), (0,))]
    )
    if mean.types != old.type.types:
        axis = next((a for a in mean if mean[a] != old.type[a]), None)
        raise Refusal(RUNNING, axis, old, repr(mean[axis]) if axis else repr(mean))


_NORM_OF_ALL = "the norm needs all numbers of a row, and this rank holds a piece of them"


def norm_except(op: Op, v: Operand, pow: Any = 2, dim: int = 0) -> TensorType:
    """norm_except_dim: one number for each row of the dim; of -1, one for all."""
    return combine(op.linearity, [Term(v, _rows_kept(v, dim))])


def weight_norm(op: Op, v: Operand, g: Operand, dim: int = 0) -> TensorType:
    """_weight_norm: g * v / the norm of v for each row of the dim; linear in g.

    Its kernel takes any shapes at their word, and reads and writes beyond the memory of
    others than these; nor does it take tensors without elements.
    """
    wanted = tuple(n if d == dim else 1 for d, n in enumerate(v.shape)) if dim >= 0 else ()
    fits = -1 <= dim < v.ndim and g.shape == wanted and g.dtype == v.dtype
    cuts = [cut for x in (v, g) for d in x.type.cut_dims for cut in x.type.cuts(d)]
    empty = 0 in v.shape or any(0 in extent.sizes for _, extent in cuts)
    if not fits or empty:
        raise Refusal(
            "the shapes of v and g do not fit together, or a rank has no elements",
            operand=g, expected=f"a tensor of shape {wanted}, as v has its dtype",
        )  # fmt: skip
    rows = _rows_kept(v, dim)
    each = inner_value(combine(op.linearity, [Term(v, rows)]), v.shape, v)
    labels = tuple(d if d == dim else None for d in range(g.ndim))
    every = tuple(range(v.ndim))
    return combine(MULTILINEAR, [Term(each, every), Term(g, labels)])


def _rows_kept(v: Operand, dim: int) -> tuple[Label, ...]:
    return tuple(d if d == dim else Mixed(_NORM_OF_ALL) for d in range(v.ndim))
