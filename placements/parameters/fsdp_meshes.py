"""The meshes for FSDP2: of the ranks of a mesh, those that hold copies and shards."""

from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh

from placements._torch import device_mesh_over, timeout_of
from placements.types.mesh import Mesh


def mesh_over(mesh: Mesh, axes: Sequence[str], copies: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh for FSDP2 over these axes: (copies, shards), or shards alone.

    One object for the same question: process groups are made once, and FSDP2 groups
    parameters by it.
    """
    key = "fully_shard", *((axis, copies.get(axis, 1)) for axis in axes)
    made = mesh.regrouped.get(key)
    if made is None or not _has_groups(made):
        made = mesh.regrouped[key] = _made(mesh, axes, copies)
    return made


def _has_groups(device_mesh: DeviceMesh) -> bool:
    """Return whether its process groups are there: a mesh may outlive them."""
    try:
        device_mesh.get_group(0)
    except RuntimeError:
        return False
    return True


def _made(mesh: Mesh, axes: Sequence[str], copies: Mapping[str, int]) -> DeviceMesh:
    device_mesh = mesh.device_mesh
    assert device_mesh is not None
    outer = [axis for axis in axes if copies.get(axis, 1) == mesh.sizes[axis]]
    inner = [axis for axis in axes if copies.get(axis, 1) == 1]
    if len(inner) == 1 and [*outer, *inner] == [*axes] and len(outer) <= 1:
        return device_mesh[(*outer, *inner)]  # the mesh has these groups already
    return _regrouped(mesh, device_mesh, axes, copies)


def _regrouped(
    mesh: Mesh, device_mesh: DeviceMesh, axes: Sequence[str], copies: Mapping[str, int]
) -> DeviceMesh:
    """Make a mesh of the same ranks with one dim for all copies and one for all shards."""
    sizes: list[int] = []
    kinds: list[str] = []
    for axis, size in mesh.sizes.items():
        count = copies.get(axis, 1) if axis in axes else 1
        sizes += [count, size // count]
        kinds += ["copies", "shards"] if axis in axes else ["rest", "rest"]
    order = [
        dim
        for kind in ("rest", "copies", "shards")
        for dim, k in enumerate(kinds)
        if k == kind
    ]
    ranks = device_mesh.mesh.reshape(sizes).permute(order)
    number = {kind: 1 for kind in ("copies", "shards")}
    for kind, size in zip(kinds, sizes, strict=True):
        if kind != "rest":
            number[kind] *= size
    ranks = ranks.reshape(-1, number["copies"], number["shards"])
    name = "_".join(axes) or "one"
    names = ("others", f"{name}_copies", f"{name}_shards")
    kind, timeout = device_mesh.device_type, _timeout(device_mesh)
    regrouped = device_mesh_over(kind, ranks, names, timeout)
    return regrouped[names[1:]] if number["copies"] > 1 else regrouped[names[2]]


def _timeout(device_mesh: DeviceMesh) -> timedelta | None:
    """Return the shortest time that its ranks wait for each other; None: not said."""
    kind = device_mesh.device_type
    known = [timeout_of(group, kind) for group in device_mesh.get_all_groups()]
    return min((one for one in known if one is not None), default=None)
