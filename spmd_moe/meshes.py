"""The two presentations of the ranks: dense for activations, sparse for experts."""

from collections.abc import Mapping
from datetime import timedelta

from placements import Mesh, as_mesh, current_mesh, device_mesh_over, unchecked
from spmd_moe.config import Parallel

ONE_DEVICE = Mesh({})


def dense_mesh(parallel: Parallel) -> Mesh:
    """Return the current mesh, which must be the dense one; one rank needs no mesh."""
    return current_mesh_of(parallel.dense_mesh())


def current_mesh_of(wanted: Mapping[str, int]) -> Mesh:
    """Return the current mesh; ValueError unless it splits the axes that `wanted` does."""
    mesh = current_mesh() or ONE_DEVICE
    sizes = {axis: n for axis, n in mesh.sizes.items() if n > 1}
    if sizes != {axis: n for axis, n in wanted.items() if n > 1}:
        raise ValueError(
            f"the current mesh ({mesh!r}) must have the sizes of the layer, "
            f"{dict(wanted)}: with set_current_mesh(mesh): ..."
        )
    return mesh


def has_axis(mesh: Mesh, axis: str) -> bool:
    """Return whether there is anything to move over `axis`.

    A mesh may leave out an axis of one rank. `mesh` is one that `current_mesh_of` gave, so
    it leaves out no other.
    """
    return axis in mesh.sizes


def make_sparse_mesh(
    parallel: Parallel, dense: Mesh, timeout: timedelta | None = None
) -> Mesh:
    """Make the mesh (edp, ep, etp) over the ranks of `dense`, in the same order.

    Over a DeviceMesh this makes process groups, which all ranks must do together; layers
    can share the result. `timeout` is that of the groups; by default torch's.
    """
    sizes = parallel.sparse_mesh()
    if dense.device_mesh is not None:
        kind = dense.device_mesh.device_type
        with unchecked():  # inside typecheck() the mesh's own tensors have no type
            ranks = dense.device_mesh.mesh.reshape(tuple(sizes.values()))
            return as_mesh(device_mesh_over(kind, ranks, tuple(sizes), timeout))
    return Mesh(sizes, _coordinate(sizes, dense))


def _coordinate(sizes: Mapping[str, int], dense: Mesh) -> dict[str, int]:
    rank = 0
    for axis, size in dense.sizes.items():
        rank = rank * size + dense.coordinate[axis]
    place: dict[str, int] = {}
    for axis, size in reversed([*sizes.items()]):
        rank, place[axis] = divmod(rank, size)
    return place
