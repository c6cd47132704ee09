"""Flows of ops that move a window over the last dims: convolutions, pools, resizing."""

from collections.abc import Sequence
from typing import Any

from placements.inference.combine import combine
from placements.inference.flows.products import inner_value
from placements.inference.flows.views import view_of_cuts
from placements.inference.numbers import plain
from placements.inference.op import Op
from placements.inference.rules import LINEAR, NONLINEAR
from placements.inference.terms import Contract, Label, Mixed, Operand, Refusal, Term
from placements.types.extents import Extent
from placements.types.index import COMPUTED
from placements.types.padding import Pads
from placements.types.tensor import TensorType

WINDOW = "a window at the edge of a piece reaches into rows that another rank holds"
GROUPS = (
    "which channels belong together depends on their place among the channels of all "
    "groups, and this rank holds a piece of them"
)


NO_ROWS = "torch gives windows over a piece without rows another shape, or no gradient"


def _refuse_empty(*operands: Operand) -> None:
    """Refuse pieces without rows: all ranks alike, whichever of them has none."""
    for operand in operands:
        for dim in operand.type.cut_dims:
            for axis, extent in operand.type.cuts(dim):
                if 0 in extent.sizes:
                    raise Refusal(
                        NO_ROWS, axis, operand, "rows on every rank", kind="policy"
                    )


def convolution(
    op: Op,
    input: Operand,
    weight: Operand,
    bias: Any = None,
    groups: int = 1,
    *,
    out: int,
    **window: Any,
) -> TensorType:
    """input (N, C, ...) with a weight whose dim `out` is made, and the other contracted."""
    _refuse_empty(input, weight)
    spatial = weight.ndim - 2
    place = input.ndim - spatial - 1  # the channels; before them at most a batch
    windows: tuple[Label, ...] = (Mixed(WINDOW),) * spatial
    # A number of groups that belongs to an axis is 1 on some ranks only.
    is_one = groups.__class__ is int and groups == 1
    channels: Label = Contract("channels") if is_one else Mixed(GROUPS)
    made: Label = place if is_one else Mixed(GROUPS)
    of_weight = (made, channels) if out == 0 else (channels, made)
    terms = [
        Term(input, (*range(place), channels, *windows)),
        Term(weight, (*of_weight, *windows)),
    ]
    product = combine(op.linearity, terms)
    if not isinstance(bias, Operand):
        return product
    many = weight.shape[0] if out == 0 else weight.shape[1] * int(plain(groups))
    shape = (*input.shape[:place], many, *input.shape[place + 1 :])
    whole = Term(inner_value(product, shape, input), tuple(range(input.ndim)))
    return combine(LINEAR, [whole, Term(bias, (made,))])


def pooled(op: Op, input: Operand, *, dims: int, **window: Any) -> TensorType:
    """The last dims are looked along, in windows; those before them are kept."""
    _refuse_empty(input)
    kept = input.ndim - dims
    labels = [d if d < kept else Mixed(WINDOW) for d in range(input.ndim)]
    # A mean of whole numbers is rounded.
    linearity = op.linearity if input.can_have_gradient else NONLINEAR
    return combine(linearity, [Term(input, tuple(labels))])


def pooled_with_places(
    op: Op, input: Operand, *, dims: int, **window: Any
) -> Sequence[TensorType]:
    """A pool that also says where in the last dims each element was."""
    found = pooled(op, input, dims=dims)
    return found, found.with_index(COMPUTED)


def resized(op: Op, input: Operand, **window: Any) -> TensorType:
    """interpolate: all dims after batch and channels."""
    return pooled(op, input, dims=input.ndim - 2)


def sampled(op: Op, input: Operand, grid: Operand, **settings: Any) -> TensorType:
    """grid_sample: elements of the input (N, C, ...) at places of a grid (N, ..., 2)."""
    reads = (Mixed(WINDOW),) * (input.ndim - 2)
    terms = [
        Term(input, (0, 1, *reads)),
        Term(grid, (0, *range(2, grid.ndim), Mixed(WINDOW)), is_control=True),
    ]
    return combine(op.linearity, terms)


def shuffled(op: Op, input: Operand, upscale_factor: int) -> TensorType:
    """pixel_shuffle: each place becomes several, so the pieces of places grow."""
    _refuse_empty(input)
    channels = input.ndim - 3
    for axis in input.cut_axes(channels):
        raise Refusal(GROUPS, axis, input, "a dim that is not cut")

    def grown(axis: str, dim: int, extent: Extent) -> tuple[int, Extent]:
        return dim, extent.scaled(upscale_factor) if dim > channels else extent

    def view(pads: Pads) -> Pads | None:
        return pads if all(dim < channels for dim in pads.dims) else None

    return view_of_cuts(op, input, grown, view)


def over_channels(op: Op, input: Operand, **settings: Any) -> TensorType:
    """local_response_norm: along the channels, in dim 1."""
    labels = [Mixed(GROUPS) if d == 1 else d for d in range(input.ndim)]
    return combine(op.linearity, [Term(input, tuple(labels))])


def unfolded(
    op: Op,
    input: Operand,
    dimension: int | None = None,
    **window: Any,
) -> TensorType:
    """x.unfold(dim, size, step): windows of one dim; F.unfold: of the last two."""
    if dimension is None:
        # (N, C, H, W) -> (N, C * the window, places)
        channels = input.ndim - 3
        labels = [d if d < channels else Mixed(WINDOW) for d in range(input.ndim)]
        return combine(op.linearity, [Term(input, tuple(labels))])
    along = dimension % input.ndim if input.ndim else 0
    labels = [Mixed(WINDOW) if d == along else d for d in range(input.ndim)]
    return combine(op.linearity, [Term(input, tuple(labels))], index=input.type.index)


def folded(op: Op, input: Operand, **window: Any) -> TensorType:
    """F.fold: (N, C * the window, places) -> (N, C, H, W)."""
    labels = [d if d < input.ndim - 2 else Mixed(WINDOW) for d in range(input.ndim)]
    return combine(op.linearity, [Term(input, tuple(labels))])
