"""A process group that sends nothing, for peers that type-check on a real DeviceMesh."""

import logging
import math
import threading
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from placements import _torch
from placements.types.mesh import Mesh

WORLD_SIZE = 4

_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


class _OfThread(threading.local):
    mesh: DeviceMesh | None = None


_of_thread = _OfThread()


@contextmanager
def silent_torch() -> Generator[None]:
    """Silence what torch logs: shapes and redistributions that fail are verdicts here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)


@contextmanager
def fake_world(size: int = WORLD_SIZE) -> Generator[None]:
    """Start torch.distributed with the fake backend, until the block ends."""
    _torch.require("peers")
    if dist.is_initialized():
        raise ValueError("torch.distributed is initialised already; destroy it first")
    store = _torch.fake_store()
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        with silent_torch():
            yield
    finally:
        _meshes.clear()
        dist.destroy_process_group()


@contextmanager
def quiet() -> Generator[None]:
    """Ignore warnings: those of the peers are not findings of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def on_mesh(device_mesh: DeviceMesh) -> Generator[None]:
    """Let peers type-check on this mesh, of real or simulated ranks, in this thread."""
    _of_thread.mesh = device_mesh
    try:
        yield
    finally:
        _of_thread.mesh = None


def device_mesh_of(mesh: Mesh) -> DeviceMesh:
    """Return the mesh of `on_mesh`, else one of these sizes on ranks of the fake world."""
    if _of_thread.mesh is not None:
        return _of_thread.mesh
    key = tuple(mesh.sizes.items())
    if key not in _meshes:
        if not dist.is_initialized():
            raise ValueError("peers need a process group: with fake_world(): ...")
        ranks = torch.arange(math.prod(mesh.sizes.values())).view(*mesh.sizes.values())
        _meshes[key] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(mesh.sizes))
    return _meshes[key]
