"""A process group that sends nothing, for peers that type-check on a real DeviceMesh."""

import logging
import math
import warnings
from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from placements.mesh import Mesh

WORLD_SIZE = 4

_meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}


@contextmanager
def fake_world() -> Generator[None]:
    """Initialise torch.distributed with the fake backend, and tear it down again."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("torch.distributed is initialised already; destroy it first")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    # Shapes that do not fit are a verdict here; torch logs them as errors first.
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        _meshes.clear()
        dist.destroy_process_group()


@contextmanager
def quiet() -> Generator[None]:
    """Without warnings: those of the peers are not findings of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def device_mesh_of(mesh: Mesh) -> DeviceMesh:
    """The DeviceMesh of these sizes on the first ranks of the fake world."""
    key = tuple(mesh.sizes.items())
    if key not in _meshes:
        if not dist.is_initialized():
            raise ValueError("peers need a process group: with fake_world(): ...")
        ranks = torch.arange(math.prod(mesh.sizes.values())).view(*mesh.sizes.values())
        _meshes[key] = DeviceMesh("cpu", ranks, mesh_dim_names=tuple(mesh.sizes))
    return _meshes[key]
