"""Tensors on all ranks at once: what each rank holds, and its type there.

`meaning.split` and `join` take one type for all ranks. Where two axes cut one dim
unevenly the inner extent differs by outer rank, and the many ways to write a value as a
sum matter to tests: so here every rank has its own type, and Partial values are split
into drawn summands.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from placements.types.axis import AxisType, Shard
from placements.types.extents import Extent, Padded, Ragged, ZigZag, fold
from placements.types.meaning import join, take_piece
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make

# A rank's coordinate: its place on every axis of the mesh, in mesh order.
Place = tuple[int, ...]


@dataclass(frozen=True)
class CutPattern:
    """A way to cut a dim of any size: like torch.chunk, by weights, in blocks, zig-zag.

    `weights` by rank; none is like torch.chunk. `blocks` > 1: so many blocks, each cut
    alike (`Folded`), where the size is a multiple of it. `zigzag` where it divides.
    """

    weights: tuple[int, ...] = ()
    blocks: int = 1
    zigzag: bool = False

    def extent(self, size: int, ranks: int) -> Extent:
        if self.blocks > 1 and size and size % self.blocks == 0:
            block = replace(self, blocks=1)
            return fold(self.blocks, block.extent(size // self.blocks, ranks))
        if self.zigzag and size % (2 * ranks) == 0:
            return ZigZag(size).over(ranks)
        if sum(self.weights[:ranks]) == 0:
            return Padded(size).over(ranks)
        whole = (*self.weights, *(0,) * ranks)[:ranks]
        ends = [size * sum(whole[: r + 1]) // sum(whole) for r in range(ranks)]
        starts = [0, *ends[:-1]]
        return Ragged(*(e - s for s, e in zip(starts, ends, strict=True))).over(ranks)


CHUNKS = CutPattern()
ZIGZAG = CutPattern(zigzag=True)


@dataclass(frozen=True)
class UnsizedShard:
    """A dim is cut: a Shard before the size of the dim is known."""

    dim: int
    pattern: CutPattern = CHUNKS


@dataclass(frozen=True)
class UnsizedType:
    """What a tensor is on each axis; cuts of one dim from the outermost."""

    axes: Mapping[str, AxisType | UnsizedShard]

    def types(self, mesh: Mesh, shape: Sequence[int]) -> list[TensorType]:
        """Return the type on every rank of a tensor of that global shape."""
        return [self._type(mesh.seen_from(place), shape) for place in mesh.coordinates()]

    def _type(self, mesh: Mesh, shape: Sequence[int]) -> TensorType:
        rows = list(shape)
        types: dict[str, AxisType] = {}
        for axis, t in self.axes.items():
            if isinstance(t, UnsizedShard):
                extent = t.pattern.extent(rows[t.dim], mesh.sizes[axis])
                rows[t.dim] = extent.local_size(mesh.place[axis])
                types[axis] = Shard(t.dim, extent)
            else:
                types[axis] = t
        return make(mesh, types)


def places(mesh: Mesh) -> list[Place]:
    return [tuple(place.values()) for place in mesh.coordinates()]


def on_axes(mesh: Mesh, place: Place, axes: Sequence[str]) -> Place:
    """Return the part of a coordinate that lies on these axes."""
    return tuple(p for axis, p in zip(mesh.sizes, place, strict=True) if axis in axes)


def split_ranks(
    value: Callable[[Place], Tensor],
    types: Sequence[TensorType],
    mesh: Mesh,
    generator: torch.Generator,
) -> list[Tensor]:
    """Return what every rank holds of the value for its place on Varying axes."""
    varying = [axis for axis, t in types[0].items() if t.letter == "V"]
    partial = [axis for axis, t in types[0].items() if t.letter == "P"]
    values: dict[Place, Tensor] = {}
    summands: dict[Place, dict[Place, Tensor]] = {}
    held: list[Tensor] = []
    for place, t in zip(places(mesh), types, strict=True):
        own = on_axes(mesh, place, varying)
        if own not in values:
            values[own] = value(own)
            summands[own] = _summands(values[own], mesh, partial, generator)
        local = summands[own][on_axes(mesh, place, partial)]
        coordinate = dict(zip(mesh.sizes, place, strict=True))
        for axis, shard in t.items():
            if isinstance(shard, Shard) and shard.extent is not None:
                local = take_piece(local, shard.dim, shard.extent, coordinate[axis])
        held.append(local.clone())
    return held


def _summands(
    value: Tensor, mesh: Mesh, axes: Sequence[str], generator: torch.Generator
) -> dict[Place, Tensor]:
    parts = Mesh({axis: mesh.sizes[axis] for axis in mesh.sizes if axis in axes})
    first, *others = places(parts)
    drawn: dict[Place, Tensor] = {}
    left = value
    for place in others:
        drawn[place] = _summand(left, generator)
        left = left - drawn[place]
    return {first: left, **drawn}


def _summand(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return one of two parts of a value; parts of a count are counts."""
    if not value.dtype.is_floating_point and bool((value >= 0).all()):
        share = torch.rand(value.shape, generator=generator)
        return (share * (value + 1)).to(value.dtype)
    return torch.randint(-3, 4, value.shape, generator=generator).to(value.dtype)


def join_ranks(
    held: Sequence[Tensor],
    types: Sequence[TensorType],
    mesh: Mesh,
    apart: Sequence[str] = (),
) -> dict[Place, Tensor]:
    """Join what the ranks hold over all axes but `apart`; one value for each place there.

    Raises ValueError where values that a type calls equal are not.
    """
    values = dict(zip(places(mesh), zip(held, types, strict=True), strict=True))
    left = list(mesh.sizes)
    for axis in reversed(list(types[0])):
        if axis in apart:
            continue
        at = left.index(axis)
        groups: dict[Place, list[tuple[Tensor, TensorType]]] = {}
        for place, one in values.items():
            groups.setdefault((*place[:at], *place[at + 1 :]), []).append(one)
        values = {
            place: (_join_axis(group, axis), group[0][1]) for place, group in groups.items()
        }
        left.remove(axis)
    # Axes of size 1 are in no type: their place is 0.
    drop = [k for k, axis in enumerate(left) if axis not in apart]
    return {
        tuple(p for k, p in enumerate(place) if k not in drop): value
        for place, (value, _) in values.items()
    }


def _join_axis(group: Sequence[tuple[Tensor, TensorType]], axis: str) -> Tensor:
    return join(
        [value for value, _ in group], {axis: group[0][1][axis]}, {axis: len(group)}
    )


def part_of(value: Tensor, t: TensorType, generator: torch.Generator) -> Tensor:
    """Return what the rank that sees `t` holds of a value; no axis may be Varying.

    Ranks that use equal generators hold parts of one value.
    """
    mesh = t.mesh
    partial = [axis for axis, one in t.items() if one.letter == "P"]
    place = tuple(mesh.place.values())
    local = _summands(value, mesh, partial, generator)[on_axes(mesh, place, partial)]
    for axis, shard in t.items():
        if isinstance(shard, Shard) and shard.extent is not None:
            local = take_piece(local, shard.dim, shard.extent, mesh.place[axis])
    return local.clone()
