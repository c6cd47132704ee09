"""The meaning of a type, as code: cut a global value into locals, and join locals.

Replicate and Invariant: every rank holds the value. Shard: pieces. Partial: the locals
sum to the value. Varying: unrelated locals, so the "global value" is their stack, with
one leading dim for every Varying axis in mesh order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from placements._torch import unseen
from placements.types.axis import AxisType, Partial, Shard, TypesLike, Varying
from placements.types.extents import Extent, Folded, Padded, ZigZag
from placements.types.mesh import Mesh, MeshLike, as_mesh, unknown_axis
from placements.types.text import as_axis_type


def split(value: Tensor, types: TypesLike, mesh: MeshLike) -> list[Tensor]:
    """A global value -> its locals, in rank order.

    A Shard without an extent is cut like `torch.chunk` does (`Padded`). Of the many
    locals that sum to a Partial this takes the value on the first rank, zeros elsewhere.
    """
    mesh = as_mesh(mesh)
    with unseen():
        cut = _complete(types, mesh, value.dim() - _num_varying(types, mesh))
        pieces = [_local(value, cut, mesh, place) for place in mesh.coordinates()]
        return [piece.clone() for piece in pieces]


def piece_of(value: Tensor, types: TypesLike, mesh: Mesh) -> Tensor:
    """A global value -> this rank's local, as `split` cuts it, in memory of its own."""
    with unseen():
        cut = _complete(types, mesh, value.dim() - _num_varying(types, mesh))
        return _local(value, cut, mesh, mesh.place).clone()


def join(locals_: Sequence[Tensor], types: TypesLike, mesh: MeshLike) -> Tensor:
    """Locals in rank order -> the global value; the inverse of `split`.

    Raises ValueError if locals that a type calls equal are not.
    """
    mesh = as_mesh(mesh)
    if len(locals_) != mesh.num_ranks:
        raise ValueError(f"{mesh!r} has {mesh.num_ranks} ranks, got {len(locals_)} locals")
    cut = _complete(types, mesh, locals_[0].dim())
    values = list(locals_)
    axes = list(mesh.sizes)
    # Merge one mesh axis at a time: the cuts from the innermost outward, and Varying
    # axes last, since each of those adds a leading dim.
    merged_first = [a for a in reversed(list(cut)) if not isinstance(cut[a], Varying)]
    varying = [a for a in reversed(axes) if isinstance(cut.get(a), Varying)]
    rest = [a for a in axes if a not in cut]
    with unseen():
        for axis in [*rest, *merged_first, *varying]:
            values = _merge_axis(values, axes, axis, mesh, cut.get(axis))
            axes.remove(axis)
    return values[0]


def _complete(types: TypesLike, mesh: Mesh, ndim: int) -> dict[str, AxisType]:
    """Return the mapping's AxisTypes on axes of size > 1, dims counted from the front."""
    wrong = unknown_axis(mesh, types)
    if wrong is not None:
        raise ValueError(f"the type {wrong}")
    cut = {a: as_axis_type(t) for a, t in types.items() if mesh.sizes.get(a, 1) > 1}
    missing = [axis for axis in mesh.axes if axis not in cut]
    if missing:
        raise ValueError(
            f"no placement for mesh axis {missing[0]!r}. "
            f"Given: {sorted(types)}; required: {list(mesh.axes)}"
        )
    for axis, t in cut.items():
        if isinstance(t, Shard):
            if not -ndim <= t.dim < ndim:
                raise ValueError(f"{t!r} names a dim that {ndim} dims do not have")
            cut[axis] = Shard(t.dim % ndim, t.extent)
    return cut


def _num_varying(types: TypesLike, mesh: Mesh) -> int:
    return sum(
        isinstance(as_axis_type(t), Varying)
        for axis, t in types.items()
        if mesh.sizes.get(axis, 1) > 1
    )


def _local(
    value: Tensor, cut: dict[str, AxisType], mesh: Mesh, place: dict[str, int]
) -> Tensor:
    for axis in mesh.axes:
        if isinstance(cut[axis], Varying):
            value = value[place[axis]]
    for axis, t in cut.items():
        if isinstance(t, Partial) and place[axis] != 0:
            value = torch.zeros_like(value)
        if isinstance(t, Shard):
            extent = (t.extent or Padded(value.shape[t.dim])).over(mesh.sizes[axis])
            value = take_piece(value, t.dim, extent, place[axis])
    return value


def _in_blocks(value: Tensor, dim: int, outer: int, size: int) -> Tensor:
    return value.reshape(*value.shape[:dim], outer, size, *value.shape[dim + 1 :])


def take_piece(value: Tensor, dim: int, extent: Extent, rank: int) -> Tensor:
    """Return the rows of `dim` that `rank` holds."""
    if extent.total != value.shape[dim]:
        raise ValueError(
            f"{extent!r} cuts {extent.total} rows, but dim {dim} has {value.shape[dim]}"
        )
    if isinstance(extent, Folded):
        blocks = _in_blocks(value, dim, extent.outer, extent.inner.total)
        return take_piece(blocks, dim + 1, extent.inner, rank).flatten(dim, dim + 1)
    if isinstance(extent, ZigZag):
        runs = [value.narrow(dim, at, extent.run) for at in extent.starts(rank)]
        return torch.cat(runs, dim)
    return value.narrow(dim, extent.offset(rank), extent.local_size(rank))


def put_pieces(pieces: Sequence[Tensor], dim: int, extent: Extent) -> Tensor:
    """All ranks' rows -> the whole dim; the inverse of `take_piece`."""
    if isinstance(extent, Folded):
        blocks = [
            _in_blocks(piece, dim, extent.outer, extent.inner.local_size(rank))
            for rank, piece in enumerate(pieces)
        ]
        return put_pieces(blocks, dim + 1, extent.inner).flatten(dim, dim + 1)
    if isinstance(extent, ZigZag):
        front, back = zip(*(piece.tensor_split(2, dim) for piece in pieces), strict=True)
        return torch.cat([*front, *reversed(back)], dim)
    return torch.cat(list(pieces), dim)


def _merge_axis(
    values: list[Tensor], axes: list[str], axis: str, mesh: Mesh, t: AxisType | None
) -> list[Tensor]:
    """Merge the values of all ranks of `axis`; `values` is row-major over `axes`."""
    size = mesh.sizes[axis]
    inner = 1
    for later in axes[axes.index(axis) + 1 :]:
        inner *= mesh.sizes[later]
    merged: list[Tensor] = []
    for start in range(0, len(values), size * inner):
        for offset in range(inner):
            group = values[start + offset : start + size * inner : inner]
            merged.append(_merge(group, axis, t))
    return merged


def _merge(group: list[Tensor], axis: str, t: AxisType | None) -> Tensor:
    if isinstance(t, Shard):
        sizes = tuple(piece.shape[t.dim] for piece in group)
        extent = t.extent.over(len(group)) if t.extent else None
        if extent is not None and extent.sizes != sizes:
            raise ValueError(
                f"{t!r} on axis {axis!r} gives the ranks {extent.sizes} rows, "
                f"but they hold {sizes}"
            )
        return put_pieces(group, t.dim, extent or Padded(sum(sizes)))
    if isinstance(t, Partial):
        return torch.stack(group).sum(0, dtype=group[0].dtype)
    if isinstance(t, Varying):
        return torch.stack(group)
    for rank, other in enumerate(group[1:], 1):
        if not _equal(group[0], other):
            raise ValueError(
                f"{t or 'a size-1 axis'} on axis {axis!r} means equal values, "
                f"but rank 0 and rank {rank} differ"
            )
    return group[0]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two ranks hold the same values; NaN equals NaN here."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
