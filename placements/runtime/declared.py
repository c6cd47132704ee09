"""The type that a declaration gives a local tensor."""

from collections.abc import Mapping

from placements.runtime.mesh import unknown_axis_here
from placements.runtime.tags import Declaration
from placements.types.axis import AxisType, Shard, TypesLike
from placements.types.errors import ArgumentError
from placements.types.extents import Even, Extent, Padded
from placements.types.index import Index
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make, one_of
from placements.types.text import as_axis_type


def declared(
    mesh: Mesh,
    types: TypesLike,
    shape: tuple[int, ...],
    index: Index | None = None,
) -> TensorType:
    """Return the TensorType that a declaration gives a local tensor of that shape.

    Every axis of size > 1 must be declared. Axes that the mesh has with size 1, or that
    only another presentation of it has, or that are optional, are ignored; others are an
    ArgumentError. A Shard without an extent is cut evenly.
    """
    if not isinstance(types, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"a declaration maps axes to types, such as {{'tp': R}}; got {types!r}"
        )
    wrong = unknown_axis_here(mesh, types)
    if wrong is not None:
        raise ArgumentError(f"the declaration {wrong}")
    said = {a: as_axis_type(t) for a, t in types.items() if a in mesh.position}
    missing = [axis for axis in mesh.axes if axis not in said]
    if missing:
        raise ArgumentError(
            f"no placement is declared for mesh axis {missing[0]!r}. "
            f"Declared: {sorted(types)}; required: {list(mesh.axes)}"
            + _elsewhere(mesh, types)
        )
    said = {axis: _dim_from_front(t, len(shape)) for axis, t in said.items()}
    for dim, size in enumerate(shape):
        axes = [a for a, t in said.items() if isinstance(t, Shard) and t.dim == dim]
        said |= _bound_cuts(mesh, dim, size, {a: said[a] for a in axes})
    return one_of(make(mesh, said, index))


def _elsewhere(mesh: Mesh, types: Mapping[str, object]) -> str:
    """Return what to do if no axis of a declaration is one of this mesh."""
    if any(axis in mesh.position for axis in types) or not types:
        return ""
    return (
        f". None of the declared axes is one of {mesh!r}, which is current here: make the "
        "mesh of the declaration current where the tensor is used, or declare it on the "
        "axes of this one"
    )


def declared_of(mesh: Mesh, said: Declaration, shape: tuple[int, ...]) -> TensorType:
    """Return the same for a declaration that a module keeps, worked out once."""
    last = said.last
    if last is None or last[0] is not mesh or last[1] != shape:
        made = declared(mesh, said, shape)
        last = said.last = mesh, shape, made
        said.settled = None if made.cut_dims else made
    return last[2]


def _dim_from_front(t: AxisType, ndim: int) -> AxisType:
    if not isinstance(t, Shard):
        return t
    if not -ndim <= t.dim < ndim:
        raise ArgumentError(f"{t!r} names a dim that a {ndim}-dim tensor does not have")
    return Shard(t.dim % ndim, t.extent)


def _bound_cuts(
    mesh: Mesh, dim: int, size: int, shards: Mapping[str, AxisType]
) -> dict[str, AxisType]:
    """Bind the extents of all cuts of one dim, and check them against `size`."""
    extents: dict[str, Extent | None] = {}
    for axis, t in shards.items():
        assert isinstance(t, Shard)
        try:
            extents[axis] = t.extent and t.extent.over(mesh.sizes[axis])
        except ValueError as error:  # the extent that was declared does not fit the axis
            raise ArgumentError(str(error)) from None
    piece: int | None = None
    for axis, extent in extents.items():
        if extent is None and piece is not None:
            extents[axis] = extent = Padded(piece).over(mesh.sizes[axis])
        piece = extent and extent.local_size(mesh.place[axis])
    inner = size
    for axis, extent in reversed(extents.items()):
        if extent is None:
            extent = Even(inner * mesh.sizes[axis], mesh.sizes[axis])
            extents[axis] = extent
        held = extent.sizes[mesh.place[axis]]
        if held != inner:
            raise ArgumentError(
                f"dim {dim} has {inner} rows here, but {extent!r} over axis {axis!r} "
                f"({mesh.sizes[axis]} ranks) gives rank {mesh.place[axis]} "
                f"{held} rows"
            )
        inner = extent.total
    return {axis: Shard(dim, extent) for axis, extent in extents.items()}
