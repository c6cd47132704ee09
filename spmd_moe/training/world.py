"""Find the ranks of a run: torchrun or Slurm started them, or this process is alone."""

import gc
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from placements import Mesh, as_mesh, device_mesh_over
from spmd_moe.config import Parallel
from spmd_moe.meshes import make_sparse_mesh
from spmd_moe.training.errors import RankFailed, Unusable
from spmd_moe.training.meeting import on_loopback, store_of, without_torchs_log


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int
    size: int
    address: str = "127.0.0.1"
    port: int = 29500
    has_store: bool = False  # whoever started the ranks has the store at which they meet


ALONE = World(0, 1)
LAST_PORT = 65535
_STEP_TASKS = "SLURM_STEP_NUM_TASKS"  # set by srun alone, not in a script for sbatch
_START = "unset it to start local processes, or start the ranks by torchrun or srun"


def given_world(environment: Mapping[str, str], port: int | None = None) -> World | None:
    """Return the job that this process was started in; None if there is no job.

    Raises Unusable if the environment contradicts itself. A Slurm step of one task is no
    job: the task starts processes itself, like any other program.
    """
    env = environment
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size = _whole(env, "RANK"), _whole(env, "WORLD_SIZE", least=1)
        address, chosen = "127.0.0.1", 29500
    elif "SLURM_PROCID" in env and env.get(_STEP_TASKS, "1") != "1":
        rank, size = _whole(env, "SLURM_PROCID"), _whole(env, _STEP_TASKS, least=2)
        nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "127.0.0.1"))
        address = first_node(nodes)
        # Jobs that share a machine should not share a port.
        chosen = 20000 + _whole(env, "SLURM_JOB_ID", default=0) % 20000
    else:
        return None
    if rank >= size:
        raise Unusable(f"this is rank {rank} of {size} in the environment; {_START}")
    meet_at = port or _whole(env, "MASTER_PORT", least=1, most=LAST_PORT, default=chosen)
    # By torchrun, which has a store for itself, and by our launcher.
    has_store = port is None and env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return World(rank, size, env.get("MASTER_ADDR", address), meet_at, has_store)


def tasks_for_srun(environment: Mapping[str, str]) -> int:
    """Count the tasks of a Slurm allocation for srun to start, where srun started none."""
    if _STEP_TASKS in environment:
        return 1
    return _whole(environment, "SLURM_NTASKS", least=1, default=1)


def _whole(
    env: Mapping[str, str],
    name: str,
    *,
    least: int = 0,
    most: int = 2**31,
    default: int | None = None,
) -> int:
    if default is not None and name not in env:
        return default
    text = env[name]
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise Unusable(
            f"{name} is {text!r} in the environment, not a whole number from {least} to "
            f"{most}; {_START}"
        )
    return int(text)


def first_node(nodes: str) -> str:
    """'gpu[003-007,012],login' -> 'gpu003'."""
    first = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return nodes if first is None else first[1] + (first[2] or "")


@contextmanager
def joined(world: World, timeout: float) -> Generator[None]:
    """Join a process group over the ranks, and leave it at the end.

    Raises RankFailed if the ranks cannot meet.
    """
    torch.set_num_threads(1)  # the model is small: more would wait for each other
    with on_loopback(world.address):
        try:
            with without_torchs_log():
                dist.init_process_group(
                    "gloo",
                    store=_store(world, timeout),
                    rank=world.rank,
                    world_size=world.size,
                    timeout=timedelta(seconds=timeout),
                )
        except (dist.DistError, OSError, UnicodeError) as error:
            raise RankFailed(
                f"rank {world.rank} did not meet the others at "
                f"{world.address}:{world.port} ({error}): start all {world.size} ranks, or "
                "give another --port"
            ) from None
        try:
            yield
        finally:
            dist.destroy_process_group()
            # Meshes and their groups refer to each other. Groups that are left to the end
            # of the interpreter can abort it, where their threads let go of tensors.
            gc.collect()


def _store(world: World, timeout: float) -> Any:
    if world.size == 1:
        return cast(Any, dist).HashStore()  # needs no port
    hosts = world.rank == 0 and not world.has_store
    return store_of(world.address, world.port, timeout, hosts=hosts)


def wait_for_all() -> None:
    """Wait until every rank has called this."""
    cast(Any, dist).barrier()


def meshes_of(parallel: Parallel, timeout: float | None = None) -> tuple[Mesh, Mesh]:
    """Make the dense and the sparse mesh over the ranks of the process group.

    `timeout` is that of all their groups, in seconds; by default torch's.
    """
    sizes = parallel.dense_mesh()
    waits = None if timeout is None else timedelta(seconds=timeout)
    ranks = torch.arange(parallel.num_ranks).reshape(tuple(sizes.values()))
    dense = as_mesh(device_mesh_over("cpu", ranks, tuple(sizes), waits))
    return dense, make_sparse_mesh(parallel, dense, waits)
