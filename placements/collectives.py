"""Collectives and casts: `f(x, axis, src=..., dst=...)`, typed on one mesh axis.

Names and arguments are those of `spmd_types`. What each does, forward and backward, is
the table in `transitions.py`. A call over an axis of size 1 sends nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from placements.transition_calls import Axis, run
from placements.types import AxisType, AxisTypeLike, P, Shard, V, as_axis_type


def all_reduce(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = P,
    dst: AxisTypeLike | None = None,
    *,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial -> Replicate | Invariant. The sum over the ranks of `axis`.

    Backward: all-reduce for Replicate, nothing for Invariant.
    Communicates: all-reduce over `axis`.
    """
    return _cast_around("all_reduce", x, axis, src, dst, op_dtype, out_dtype)


def all_gather(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = V,
    dst: AxisTypeLike | None = None,
    *,
    gather_dim: int | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Shard | Varying -> Replicate | Invariant. All pieces joined, or values stacked.

    Pieces of unequal length need their extent: `src=S(1, Padded(5))`. Varying values are
    stacked on a new dim, `gather_dim` (0).
    Backward: reduce-scatter for Replicate, this rank's piece for Invariant.
    Communicates: all-gather over `axis`.
    """
    new_dim = _one_dim("gather_dim", gather_dim, as_axis_type(src))
    return _cast_around(
        "all_gather",
        x,
        axis,
        src,
        dst,
        op_dtype,
        out_dtype,
        new_dim=new_dim,
    )


def reduce_scatter(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = P,
    dst: AxisTypeLike = V,
    *,
    scatter_dim: int | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial -> Shard | Varying. This rank's piece (or row) of the sum.

    A Shard without an extent is cut like `torch.chunk`: 5 rows over 2 ranks are 3 and 2.
    Backward: all-gather. Communicates: reduce-scatter over `axis`.
    """
    new_dim = _one_dim("scatter_dim", scatter_dim, as_axis_type(dst))
    return _cast_around(
        "reduce_scatter", x, axis, src, dst, op_dtype, out_dtype,
        new_dim=new_dim,
    )  # fmt: skip


def all_to_all(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = V,
    dst: AxisTypeLike = V,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Varying -> Varying, rows change ranks; or Shard(i) -> Shard(j), another cut.

    Varying: `input_split_sizes[q]` rows of dim 0 go to rank q and
    `output_split_sizes[q]` come from it; without sizes, equal runs.
    Backward: the same with the sizes exchanged. Communicates: all-to-all over `axis`.
    """
    return run(
        "all_to_all", x, axis, src, dst,
        sends=input_split_sizes, receives=output_split_sizes,
    )  # fmt: skip


def redistribute(x: Tensor, axis: Axis, src: AxisTypeLike, dst: AxisTypeLike) -> Tensor:
    """Any type -> any type of the same value, by the one call that does it."""
    return run("redistribute", x, axis, src, dst)


def convert(x: Tensor, axis: Axis, src: AxisTypeLike, dst: AxisTypeLike) -> Tensor:
    """The same value under another type, without communication forward.

    `convert(x, "tp", src=I, dst=R)` is where a replicated value is put to different use
    on each rank: its backward is the all-reduce of the gradient.
    """
    return run("convert", x, axis, src, dst)


def reinterpret(x: Tensor, axis: Axis, src: AxisTypeLike, dst: AxisTypeLike) -> Tensor:
    """The same local data under another meaning; nothing moves, forward or backward."""
    return run("reinterpret", x, axis, src, dst)


def _cast_around(
    call: str,
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike | None,
    op_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    new_dim: int = 0,
) -> Tensor:
    """Run a collective in `op_dtype`; the result has `out_dtype` (else `op_dtype`)."""
    x = x if op_dtype is None else x.to(op_dtype)
    result = run(call, x, axis, src, dst, new_dim=new_dim)
    return result if out_dtype is None else result.to(out_dtype)


def _one_dim(argument: str, dim: int | None, t: AxisType) -> int:
    if isinstance(t, Shard):
        if dim is not None and dim != t.dim:
            raise ValueError(f"{argument}={dim}, but {t!r} names dim {t.dim}")
        return 0
    return dim or 0
