"""Every rank's Python object to every rank: for reports, not for training.

Runs over the groups that a mesh has anyway; makes none of its own.
"""

from typing import Any, TypeVar, cast

import torch.distributed as dist

from placements.mesh import Mesh
from placements.state import suspended
from placements.torch_private import unseen

T = TypeVar("T")


def from_all_ranks(mesh: Mesh | None, value: T) -> dict[int, T]:
    """Rank -> its value, of all ranks of `mesh`; without a mesh, of the whole world.

    On a mesh of sizes alone, or in one process, only this rank's value is known.
    Communicates: an all-gather of small objects over each axis.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {0: value}
    known = {dist.get_rank(): value}
    if mesh is None:
        return _gathered(known, dist.group.WORLD)
    if mesh.device_mesh is None:
        return known
    for axis in mesh.axes:
        known = _gathered(known, mesh.group(axis))
    return dict(sorted(known.items()))


def _gathered(known: dict[int, T], group: dist.ProcessGroup | None) -> dict[int, T]:
    parts: list[Any] = [None] * dist.get_world_size(group)
    with unseen(), suspended():
        dist.all_gather_object(parts, known, group)  # pyright: ignore[reportUnknownMemberType]
    merged: dict[int, T] = {}
    for part in cast(list[dict[int, T]], parts):
        merged.update(part)
    return merged
