"""The ranks of a run: those that torchrun or Slurm started, or this process alone."""

import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from placements import Mesh
from placements.mesh import as_mesh
from spmd_moe.config import Parallel
from spmd_moe.meshes import make_sparse_mesh


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int
    size: int
    address: str = "127.0.0.1"
    port: int = 29500


ALONE = World(0, 1)


def given_world(environment: Mapping[str, str], port: int | None = None) -> World | None:
    """The job that this process was started in; None if it was not started in one."""
    env = environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return World(
            int(env["RANK"]),
            int(env["WORLD_SIZE"]),
            env.get("MASTER_ADDR", "127.0.0.1"),
            port or int(env.get("MASTER_PORT", 29500)),
        )
    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        # Jobs that share a machine should not share a port.
        chosen = 20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000
        return World(
            int(env["SLURM_PROCID"]),
            int(env["SLURM_NTASKS"]),
            env.get("MASTER_ADDR", first_node(nodes)),
            port or int(env.get("MASTER_PORT", chosen)),
        )
    return None


def first_node(nodes: str) -> str:
    """'gpu[003-007,012],login' -> 'gpu003'."""
    first = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return nodes if first is None else first[1] + (first[2] or "")


@contextmanager
def joined(world: World, timeout: float) -> Generator[None]:
    """A process group over the ranks, left at the end.

    Raises ValueError if the ranks cannot meet.
    """
    torch.set_num_threads(1)  # the model is small: more would wait for each other
    place: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
    if world.size == 1:
        place["store"] = cast(Any, dist).HashStore()  # needs no port
    else:
        os.environ["MASTER_ADDR"] = world.address
        os.environ["MASTER_PORT"] = str(world.port)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout), **place)
    except dist.DistError as error:
        raise ValueError(
            f"rank {world.rank} did not meet the others at {world.address}:{world.port} "
            f"({error}): start all {world.size} ranks, or give another --port"
        ) from None
    try:
        yield
    finally:
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Returns when every rank has called it."""
    cast(Any, dist).barrier()


def meshes_of(parallel: Parallel) -> tuple[Mesh, Mesh]:
    """Dense and sparse, over the ranks of the process group."""
    sizes = parallel.dense_mesh()
    dense = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return as_mesh(dense), make_sparse_mesh(parallel, as_mesh(dense))
