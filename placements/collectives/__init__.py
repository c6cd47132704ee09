"""Collectives and casts: `f(x, axis, src=..., dst=...)`, typed on one mesh axis.

Names and arguments are those of `spmd_types`. What each does, forward and backward, is
the table in `inference/transitions.py`. Over an axis of one rank nothing is sent, and the
result is that of one device: a collective returns memory of its own, a cast a view of its
input.

All take dtypes (`precision.py`). The call computes and sends in `op_dtype`, and its result
has `out_dtype`, or `op_dtype` if only that is given. Both are about the forward: the
gradient is not summed in a narrower dtype than it arrives with or leaves with, unless
`backward_options={"op_dtype": ..., "out_dtype": ...}` or `set_gradient_dtype` says so.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from placements.collectives.pending import Pending, start
from placements.collectives.precision import BackwardOptions
from placements.collectives.request import Axis, run
from placements.types.axis import AxisTypeLike, P, Shard, V
from placements.types.text import as_axis_type


def all_reduce(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = P,
    dst: AxisTypeLike | None = None,
    *,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Tensor:
    """Partial -> Replicate | Invariant. The sum over the ranks of `axis`.

    Backward: all-reduce for Replicate, nothing for Invariant.
    Communicates: all-reduce over `axis`.
    """
    dtypes = (op_dtype, out_dtype, backward_options)
    return run("all_reduce", x, axis, src, dst, dtypes)


def all_gather(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = V,
    dst: AxisTypeLike | None = None,
    *,
    gather_dim: int | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Tensor:
    """Shard | Varying -> Replicate | Invariant. All pieces joined, or values stacked.

    Pieces of unequal length need their extent: `src=S(1, Padded(5))`. Varying values are
    stacked on a new dim, `gather_dim` (0).
    Backward: reduce-scatter for Replicate, this rank's piece for Invariant.
    Communicates: all-gather over `axis`.
    """
    new_dim = _one_dim("gather_dim", gather_dim, src, x)
    dtypes = (op_dtype, out_dtype, backward_options)
    return run("all_gather", x, axis, src, dst, dtypes, new_dim=new_dim)


def reduce_scatter(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = P,
    dst: AxisTypeLike = V,
    *,
    scatter_dim: int | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Tensor:
    """Partial -> Shard | Varying. This rank's piece (or row) of the sum.

    A Shard without an extent is cut like `torch.chunk`: 5 rows over 2 ranks are 3 and 2.
    Backward: all-gather. Communicates: reduce-scatter over `axis`.
    """
    new_dim = _one_dim("scatter_dim", scatter_dim, dst, x)
    dtypes = (op_dtype, out_dtype, backward_options)
    return run("reduce_scatter", x, axis, src, dst, dtypes, new_dim=new_dim)


def all_to_all(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = V,
    dst: AxisTypeLike = V,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Tensor:
    """Varying -> Varying, rows change ranks; or Shard(i) -> Shard(j), another cut.

    Varying: `input_split_sizes[q]` rows of dim 0 go to rank q and
    `output_split_sizes[q]` come from it; without sizes, equal runs.
    Backward: the same with the sizes exchanged. Communicates: all-to-all over `axis`.
    """
    dtypes = (op_dtype, out_dtype, backward_options)
    return run(
        "all_to_all", x, axis, src, dst, dtypes,
        sends=input_split_sizes, receives=output_split_sizes,
    )  # fmt: skip


def all_to_all_start(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = V,
    dst: AxisTypeLike = V,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Pending:
    """`all_to_all` that goes on while the program does: `.wait()` gives the result.

    Backward: the exchange of the gradient starts where the wait was, and is waited for
    where the start was, so what is computed between them overlaps with it too.
    Communicates: all-to-all over `axis`.
    """
    dtypes = (op_dtype, out_dtype, backward_options)
    sizes = input_split_sizes, output_split_sizes
    return start("all_to_all", x, axis, src, dst, dtypes, *sizes)


def redistribute(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike,
    *,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Tensor:
    """Any type -> any type of the same value, by the one call that does it."""
    dtypes = (op_dtype, out_dtype, backward_options)
    return run("redistribute", x, axis, src, dst, dtypes)


def convert(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike,
    *,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Tensor:
    """The same value under another type, without communication forward.

    `convert(x, "tp", src=I, dst=R)` is where a replicated value is put to different use
    on each rank: its backward is the all-reduce of the gradient.
    """
    dtypes = (op_dtype, out_dtype, backward_options)
    return run("convert", x, axis, src, dst, dtypes)


def reinterpret(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike,
    *,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Tensor:
    """The same local data under another meaning; nothing moves, forward or backward."""
    dtypes = (op_dtype, out_dtype, backward_options)
    return run("reinterpret", x, axis, src, dst, dtypes)


def _one_dim(argument: str, dim: int | None, t: AxisTypeLike, x: Tensor) -> int:
    """Return the dim that a row per rank is added at or taken from; a Shard has its own."""
    shard = as_axis_type(t)
    if not isinstance(shard, Shard):
        return dim or 0
    if dim is not None and len({d + x.dim() * (d < 0) for d in (dim, shard.dim)}) > 1:
        raise ValueError(f"{argument}={dim}, but {shard!r} names dim {shard.dim}")
    return 0
