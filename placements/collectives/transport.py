"""What transitions do to local tensors, with a process group or by shapes alone.

There are no types and no autograd here. Pieces of unequal length are padded on the way
into a collective that needs equal ones, and trimmed on the way out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placements._torch import functional
from placements.types.extents import Extent
from placements.types.meaning import put_pieces, take_piece


@dataclass(frozen=True)
class AxisRanks:
    """The ranks of one mesh axis, seen from one of them.

    If there are several ranks but no group, nothing is sent, and only the shapes of
    results are right. Over one rank `moves` calls nothing here.
    """

    axis: str
    size: int
    rank: int
    group: dist.ProcessGroup | None

    @property
    def group_name(self) -> Any:
        assert self.group is not None
        return self.group.group_name


def _wait(result: Tensor) -> Tensor:
    return functional.wait_tensor(result)


def sum_over(ranks: AxisRanks, x: Tensor) -> Tensor:
    if ranks.group is None or x.numel() == 0:
        return x.clone()
    return _wait(functional.all_reduce(x.contiguous(), "sum", ranks.group_name))


def stack_all(ranks: AxisRanks, x: Tensor) -> Tensor:
    """Return all ranks' tensors of one shape, stacked on a new leading dim."""
    if ranks.group is None or x.numel() == 0:
        return x.new_zeros((ranks.size, *x.shape))
    flat = x.reshape(1, -1).contiguous()
    gathered = _wait(functional.all_gather_into_tensor(flat, ranks.size, ranks.group_name))
    return gathered.view(ranks.size, *x.shape)


def sum_rows(ranks: AxisRanks, x: Tensor) -> Tensor:
    """Row `rank` of the sum over ranks of x, whose leading dim has a row per rank."""
    if ranks.group is None or x.numel() == 0:
        return x[ranks.rank].clone()
    flat = x.reshape(ranks.size, -1).contiguous()
    reduced = _wait(
        functional.reduce_scatter_tensor(flat, "sum", ranks.size, ranks.group_name)
    )
    return reduced.view(x.shape[1:])


def start_exchange(
    ranks: AxisRanks, x: Tensor, sends: Sequence[int], receives: Sequence[int]
) -> Tensor:
    """Rows of dim 0: `sends[q]` of them to rank q, `receives[q]` from rank q.

    The result may be read after `arrived`, and `x` may be written to.
    """
    if ranks.group is None:
        return x.new_zeros((sum(receives), *x.shape[1:]))
    return functional.all_to_all_single(
        x.contiguous(), list(receives), list(sends), ranks.group_name
    )


def arrived(ranks: AxisRanks, in_flight: Tensor) -> Tensor:
    """Wait for what was started; nothing is done to a tensor that is not in flight."""
    return in_flight if ranks.group is None else _wait(in_flight)


def longest(extent: Extent) -> int:
    return max(extent.sizes)


def pad_to(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def gather_pieces(ranks: AxisRanks, x: Tensor, dim: int, extent: Extent) -> Tensor:
    padded = pad_to(x, dim, longest(extent))
    pieces = stack_all(ranks, padded).unbind(0)
    trimmed = [p.narrow(dim, 0, s) for p, s in zip(pieces, extent.sizes, strict=True)]
    return put_pieces(trimmed, dim, extent)


def sum_and_cut(ranks: AxisRanks, x: Tensor, dim: int, extent: Extent) -> Tensor:
    size = longest(extent)
    pieces = [
        pad_to(take_piece(x, dim, extent, rank), dim, size) for rank in range(ranks.size)
    ]
    mine = sum_rows(ranks, torch.stack(pieces))
    return mine.narrow(dim, 0, extent.local_size(ranks.rank))


def place_piece(ranks: AxisRanks, x: Tensor, dim: int, extent: Extent) -> Tensor:
    pieces: list[Tensor] = []
    for rank, size in enumerate(extent.sizes):
        shape = list(x.shape)
        shape[dim] = size
        pieces.append(x if rank == ranks.rank else x.new_zeros(shape))
    return put_pieces(pieces, dim, extent)


def blocks_for_ranks(
    ranks: AxisRanks, x: Tensor, old: tuple[int, Extent], new: tuple[int, Extent]
) -> Tensor:
    """A piece along the old dim -> what each rank gets of it, a row for each rank."""
    (old_dim, old_extent), (new_dim, new_extent) = old, new
    long_old, long_new = longest(old_extent), longest(new_extent)
    blocks = [
        pad_to(pad_to(take_piece(x, new_dim, new_extent, r), new_dim, long_new),
               old_dim, long_old)
        for r in range(ranks.size)
    ]  # fmt: skip
    return torch.stack(blocks)


def put_blocks(
    ranks: AxisRanks, received: Tensor, old: tuple[int, Extent], new: tuple[int, Extent]
) -> Tensor:
    """What each rank sent, a row for each -> the piece along the new dim."""
    (old_dim, old_extent), (new_dim, new_extent) = old, new
    mine = new_extent.local_size(ranks.rank)
    pieces = [
        block.narrow(new_dim, 0, mine).narrow(old_dim, 0, size)
        for block, size in zip(received.unbind(0), old_extent.sizes, strict=True)
    ]
    return put_pieces(pieces, old_dim, old_extent)
