"""Tensors as torch.distributed.checkpoint wants them: pieces with their place in the whole.

Its planners ask a tensor for the pieces that it is written or read in by three methods that
have no page of their own: DTensor has them, and any tensor may. A piece is given here as
(offsets in the global tensor, sizes, offsets in the local tensor).
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

# The methods by which a planner asks.
WRITE_ITEMS = "__create_write_items__"
CHUNK_LIST = "__create_chunk_list__"
SHARD = "__get_tensor_shard__"


class Piece(Protocol):
    """A part of a global tensor, and where the local tensor holds it."""

    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def local(self) -> tuple[int, ...]: ...


def write_items(
    name: str, local: Tensor, size: Sequence[int], pieces: Sequence[Piece]
) -> list[Any]:
    """Return what a rank writes of a global tensor of that size: one item for each piece.

    A tensor without elements has no pieces, but is to be found again: one item is it all.
    """
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import (
        TensorWriteData,
        WriteItem,
        WriteItemType,
    )

    places = [(piece.offsets, piece.sizes) for piece in pieces]
    if not math.prod(size):
        places = [((0,) * len(size), tuple(size))]
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                properties=properties,
                size=torch.Size(size),
            ),
        )
        for offsets, sizes in places
    ]


def chunk_list(pieces: Sequence[Piece]) -> list[Any]:
    """Return the places of the pieces that a rank reads."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
        for piece in pieces
    ]


def shard_at(
    index: Any, local: Tensor, size: Sequence[int], pieces: Sequence[Piece]
) -> Tensor:
    """Return the memory of the piece that an index names."""
    if not math.prod(size):
        return local.new_empty(tuple(size))
    if local.dim() < len(size):  # ranks hold unrelated values, which are stacked
        local = local.view(*(1,) * (len(size) - local.dim()), *local.shape)
    for piece in pieces:
        if tuple(piece.offsets) == tuple(index.offset):
            ends = zip(piece.local, piece.sizes, strict=True)
            return local[tuple(slice(at, at + n) for at, n in ends)]
    raise ValueError(f"{index.fqn!r} has no piece at {list(index.offset)} on this rank")


class GlobalView(Tensor):
    """A global tensor of which this rank holds pieces, for a checkpoint to write or read.

    It has the size of the whole, and no memory but that of the local tensor. Nothing is
    computed with it: it can only be copied, as is done before it is written at leisure.
    """

    local: Tensor
    pieces: Sequence[Piece]

    @staticmethod
    def __new__(
        cls: Any, size: Sequence[int], local: Tensor, pieces: Sequence[Piece]
    ) -> "GlobalView":
        made: Any = Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
            cls, tuple(size), dtype=local.dtype, device=local.device
        )
        made.local, made.pieces = local, pieces
        return made

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        copy = _COPIES.get(func)
        if copy is None:
            raise TypeError(
                f"{func}: this stands for a global tensor in a checkpoint; hand it to "
                "torch.distributed.checkpoint, or compute with its .local"
            )
        return copy(func, *args, **(kwargs or {}))

    def like(self, local: Tensor) -> "GlobalView":
        return GlobalView(self.shape, local, self.pieces)

    def __create_write_items__(self, name: str, _: Any) -> list[Any]:
        return write_items(name, self.local, self.shape, self.pieces)

    def __create_chunk_list__(self) -> list[Any]:
        return chunk_list(self.pieces)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return shard_at(index, self.local, self.shape, self.pieces)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        held = [(piece.offsets, piece.sizes) for piece in self.pieces]
        return f"GlobalView(size={tuple(self.shape)}, dtype={self.dtype}, held={held})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return GlobalView, (tuple(self.shape), self.local, tuple(self.pieces))


def _same_op(func: Any, x: GlobalView, *args: Any, **options: Any) -> GlobalView:
    return x.like(func(x.local, *args, **options))


def _empty(func: Any, x: GlobalView, size: Any, **options: Any) -> GlobalView:
    if tuple(size) != tuple(x.shape):
        raise TypeError(f"{func}: a global tensor of {list(x.shape)} is not {list(size)}")
    return x.like(func(x.local, list(x.local.shape), **options))


def _copy(func: Any, x: GlobalView, other: Any, *args: Any, **options: Any) -> GlobalView:
    if not isinstance(x, GlobalView) or not isinstance(other, GlobalView):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{func}: only the pieces of a global tensor go into such pieces")
    func(x.local, other.local, *args, **options)
    return x


_aten: Any = torch.ops.aten
# What makes a copy of state before it is written.
_COPIES: dict[Any, Callable[..., GlobalView]] = {
    **dict.fromkeys(
        (
            _aten.clone.default,
            _aten.detach.default,
            _aten.zeros_like.default,
            _aten.empty_like.default,
            _aten._to_copy.default,
        ),
        _same_op,
    ),
    _aten.new_empty.default: _empty,
    _aten.copy_.default: _copy,
}


def part_of_dtensor(tensor: Tensor) -> list[tuple[int, int]] | None:
    """Return which rows of each dim this rank holds of a DTensor: (first, how many)."""
    # Of its class: a tensor of a state dict may say something else of itself.
    chunks: Any = getattr(cast(Any, type(tensor)), CHUNK_LIST)(tensor)
    if len(chunks) != 1:
        return None
    return list(zip(map(int, chunks[0].offsets), map(int, chunks[0].sizes), strict=True))
