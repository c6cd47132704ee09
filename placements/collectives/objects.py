"""Send Python objects between ranks: for reports, not for training.

Uses existing process groups and creates none. Messages of a fixed size carry most reports,
because more small collectives would cost more than the training step; what is longer
follows.
"""

import gc
import zlib
from collections.abc import Callable
from threading import Lock
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
V = TypeVar("V")

# Bytes of the first collective. The first 8 of them hold the length of the message.
_FIRST = 1 << 14
_HEADER = 8
_dist = cast(Any, dist)  # its signatures are not typed to the end


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


def judged(mesh: Mesh | None, value: T, judge: Callable[[dict[int, T]], V]) -> V:
    """Return on all ranks what one of them concludes from the values of all.

    `judge` gets rank -> its value, of the ranks that `from_all_ranks` would ask. If every
    rank had all values, the work of all together would grow with the square of the ranks.
    Communicates: a gather to the first rank, and a broadcast from it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return judge({0: value})
    known = {dist.get_rank(): value}
    if mesh is not None and mesh.device_mesh is None:
        return judge(known)
    groups: list[Any] = [dist.group.WORLD]
    device = "cpu"
    if mesh is not None:
        device = cast(Any, mesh.device_mesh).device_type
        if mesh.num_ranks != dist.get_world_size():
            groups = [mesh.group(axis) for axis in mesh.axes]
    groups = [group for group in groups if dist.get_world_size(group) > 1]
    with unseen(), suspended(), torch.no_grad(), _no_collection:
        # Over one axis after the other, as long as this rank is the first of its group.
        asked = 0
        for group in groups:
            known = _at_first(known, group, device)
            asked += 1
            if dist.get_rank(group) != 0:
                break
        firsts = [dist.get_rank(group) == 0 for group in groups[:asked]]
        message = b""
        if all(firsts):
            try:
                verdict = judge(dict(sorted(known.items()))), None
            except Exception as error:  # the others wait for an answer
                verdict = None, error
            message = dumps(verdict)
        for group in reversed(groups[:asked]):
            message = _from_first(message, group, device)
    said, error = loads(message)
    if error is not None:
        raise error
    return said


class _NoCollection:
    """Let Python look for no garbage meanwhile; ranks may be threads of one process.

    What is gathered lives until it is judged, and is no garbage. It is many small objects,
    which make Python look through everything that the program holds, several times.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._was_on = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._was_on = gc.isenabled()
                gc.disable()
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside and self._was_on:
                gc.enable()


_no_collection = _NoCollection()


def _at_first(known: dict[int, T], group: Any, device: str) -> dict[int, T]:
    """Return what all ranks of the group know, on its first rank; on the others nothing."""
    message = zlib.compress(dumps(known), 1)
    mine = _padded(message, _FIRST).to(device)
    rest = _tensor(message[_FIRST - _HEADER :]).to(device)
    ranks, root = dist.get_world_size(group), dist.get_global_rank(group, 0)
    if dist.get_rank(group) != 0:
        _dist.gather(mine, None, dst=root, group=group)
        if rest.numel():
            _dist.send(rest, root, group=group)
        return {}
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    _dist.gather(mine, parts, dst=root, group=group)
    merged = dict(known)
    for rank, part in list(enumerate(parts))[1:]:
        length = int.from_bytes(_bytes(part[:_HEADER].cpu()), "little")
        body = _bytes(part[_HEADER : _HEADER + length].cpu())
        if length > len(body):
            more = torch.empty(length - len(body), dtype=torch.uint8, device=device)
            _dist.recv(more, dist.get_global_rank(group, rank), group=group)
            body += _bytes(more.cpu())
        merged.update(loads(zlib.decompress(body)))
    return merged


def _from_first(message: bytes, group: Any, device: str) -> bytes:
    """Return the message of the first rank of the group."""
    root = dist.get_global_rank(group, 0)
    part = _padded(message, _FIRST).to(device)
    _dist.broadcast(part, root, group=group)
    length = int.from_bytes(_bytes(part[:_HEADER].cpu()), "little")
    if length <= _FIRST - _HEADER:
        return _bytes(part[_HEADER : _HEADER + length].cpu())
    whole = _tensor(message.ljust(length, b"\0")).to(device)
    _dist.broadcast(whole, root, group=group)
    return _bytes(whole.cpu())


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


def _tensor(message: bytes) -> Tensor:
    return torch.frombuffer(bytearray(message) or bytearray(1), dtype=torch.uint8)[
        : len(message)
    ]


def _bytes(part: Tensor) -> bytes:
    return part.numpy().tobytes()
