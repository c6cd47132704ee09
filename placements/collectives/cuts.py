"""How a tensor and its result are cut, by the arguments of a call alone.

With checking on the types say it.
"""

from torch import Tensor

from placements.collectives.moves import DimCut
from placements.collectives.transport import AxisRanks
from placements.inference.transitions import Transition
from placements.types.axis import AxisType, Shard
from placements.types.extents import Even, Extent, Padded


def cuts_as_said(
    row: Transition, x: Tensor, ranks: AxisRanks, src: AxisType, dst: AxisType, new_dim: int
) -> tuple[DimCut | None, DimCut | None]:
    """Return how `x` and the result are cut; ValueError if `x` is not as large as said."""
    if row.dims_added == -1 and x.shape[new_dim] != ranks.size:
        raise ValueError(
            f"{row.call}: one row per rank is taken from dim {new_dim}, so it must have "
            f"{ranks.size} rows, got {x.shape[new_dim]}; for pieces of several rows use "
            "Shard"
        )
    if ranks.size == 1:
        return None, None  # the one piece is the whole, however it is said to be cut
    src_cut = _held_cut(src, x, ranks) if isinstance(src, Shard) else None
    if not isinstance(dst, Shard):
        return src_cut, None
    if row.action not in ("cut", "sum and cut", "recut"):
        return src_cut, _held_cut(dst, x, ranks)
    dim = dst.dim
    extent: Extent = (dst.extent or Padded(x.shape[dim])).over(ranks.size)
    if extent.total != x.shape[dim]:
        raise ValueError(
            f"{row.call}: {extent!r} cuts {extent.total} rows, but dim {dim} has "
            f"{x.shape[dim]}"
        )
    return src_cut, (dim, extent)


def _held_cut(t: Shard, x: Tensor, ranks: AxisRanks) -> DimCut:
    dim = t.dim
    extent = (t.extent or Even(x.shape[dim] * ranks.size)).over(ranks.size)
    if extent.local_size(ranks.rank) != x.shape[dim]:
        raise ValueError(
            f"dim {dim} has {x.shape[dim]} rows here, but {extent!r} over axis "
            f"{ranks.axis!r} gives rank {ranks.rank} {extent.local_size(ranks.rank)}"
        )
    return dim, extent
