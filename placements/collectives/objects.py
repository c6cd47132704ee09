"""Send every rank's Python object to every rank: for reports, not for training.

Uses existing process groups and creates none. One collective of a fixed size carries most
reports, because several small collectives would cost more than the training step.
"""

import zlib
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from placements._torch import unseen
from placements.collectives.messages import dumps, loads
from placements.collectives.transport import AxisRanks, stack_all
from placements.runtime.state import suspended
from placements.types.mesh import Mesh

T = TypeVar("T")

# Bytes of the first collective. The first 8 of them hold the length of the message.
_FIRST = 1 << 14
_HEADER = 8


def from_all_ranks(mesh: Mesh | None, value: T) -> dict[int, T]:
    """Rank -> its value, of all ranks of `mesh`; without a mesh, of the whole world.

    On a mesh of sizes alone, or in one process, only this rank's value is known.
    Communicates: an all-gather over the world, or over each axis of a mesh of a part of it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {0: value}
    known = {dist.get_rank(): value}
    if mesh is not None and mesh.device_mesh is None:
        return known
    device = "cpu" if mesh is None else cast(Any, mesh.device_mesh).device_type
    with unseen(), suspended(), torch.no_grad():
        if mesh is None or mesh.num_ranks == dist.get_world_size():
            return _gathered(known, dist.group.WORLD, device)
        for axis in mesh.axes:
            known = _gathered(known, mesh.group(axis), device)
    return dict(sorted(known.items()))


def _gathered(
    known: dict[int, T], group: dist.ProcessGroup | None, device: str
) -> dict[int, T]:
    size = dist.get_world_size(group)
    if size == 1:
        return known
    ranks = AxisRanks("", size, dist.get_rank(group), group)
    message = zlib.compress(dumps(known), 1)
    parts = stack_all(ranks, _padded(message, _FIRST).to(device)).cpu()
    # Every rank sees all lengths, so all know whether the rest has to follow.
    lengths = [int.from_bytes(_bytes(part[:_HEADER]), "little") for part in parts]
    longest = max(lengths) + _HEADER
    if longest > _FIRST:
        parts = stack_all(ranks, _padded(message, longest).to(device)).cpu()
    merged: dict[int, T] = {}
    for part, length in zip(parts, lengths, strict=True):
        body = _bytes(part[_HEADER : _HEADER + length])
        merged.update(loads(zlib.decompress(body)))
    return merged


def _padded(message: bytes, size: int) -> Tensor:
    whole = len(message).to_bytes(_HEADER, "little") + message
    return torch.frombuffer(bytearray(whole[:size].ljust(size, b"\0")), dtype=torch.uint8)


def _bytes(part: Tensor) -> bytes:
    return part.numpy().tobytes()
