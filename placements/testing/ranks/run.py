"""Run one function once per rank, on simulated ranks or on real gloo processes.

`run_ranks` is the whole of it. With backend "sim" the ranks are lock-step threads of
this process, and the code under test sees an ordinary `torch.distributed` whose
default group is a `SimGroup`. Threads and groups are kept from call to call, so that
thousands of examples are cheap; groups that the code under test made itself are
dropped when the call ends, and all groups are when the call failed.
"""

import atexit
import copy
import functools
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as mesh_module

# Its functions have `group=group.WORLD`, evaluated by the import: if that happened in
# a rank, they would keep the group of that rank for ever.
import torch.distributed.nn.functional as _import_outside_ranks  # noqa: F401  # pyright: ignore[reportUnusedImport]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from placements import _torch
from placements._torch import unseen
from placements.testing.ranks.backend import SimGroup
from placements.testing.ranks.calls import Simulation
from placements.testing.ranks.failures import RankFailure
from placements.testing.ranks.garbage import seldom_searched
from placements.testing.ranks.processes import run_on_processes
from placements.testing.ranks.scheduler import Scheduler
from placements.testing.ranks.store import SimStore

_mesh_module = cast(Any, mesh_module)

T = TypeVar("T")


class _World:
    """The state that torch.distributed keeps once per process, here once per rank."""

    def __init__(self) -> None:
        self.default_pg: SimGroup | None = None
        self.pg_map: dict[object, tuple[str, object]] = {}
        self.pg_names: dict[object, str] = {}
        self.pg_group_ranks: dict[object, dict[int, int]] = {}
        self.pg_backend_config: dict[object, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[object]] = {}
        self.pg_to_tag: dict[object, str] = {}
        self.pg_coalesce_state: dict[object, list[object]] = {}
        self.comms: list[object] = []
        self._rest = _torch.world()

    def __getattr__(self, name: str) -> object:
        # Torch 2.15 keeps more than 2.13 does: what is not above is as in a new process.
        return getattr(self._rest, name)


# Every group of gloo has threads that look for work all the time.
_KEPT_ON_GLOO = 3


class _Here(threading.local):
    """What the rank of the current thread (or process) knows about its call."""

    axes: dict[str, int] | None = None
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] | None = None
    world: _World | None = None
    simulation: Simulation | None = None
    store: SimStore | None = None  # torch holds only the C++ half of it


_here = _Here()


def run_ranks(
    mesh: Mapping[str, int] | int,
    fn: Callable[..., T],
    *args: object,
    backend: Literal["sim", "gloo"] = "sim",
    timeout: float = 60.0,
    seed: int = 0,
) -> list[T]:
    """Call `fn(*args)` on every rank of `mesh`; the results, by rank.

    `mesh` gives the size of each axis, `{"dp": 2, "tp": 2}`, or the number of ranks.
    Inside `fn`, `torch.distributed` is initialised and `device_mesh()` is the mesh.
    Each rank has its own copy of `args` and starts with `torch.manual_seed(seed)`.

    "sim" ranks share the process, hence module globals, closures and the default
    dtype: a leaf tensor must not be shared through a closure. "gloo" ranks are
    processes, so `fn`, `args` and results must be picklable: `fn` is a function at
    module level, and a script needs its `__main__` guard. A gloo call ends within
    `timeout` seconds; a simulated rank may compute for that long between two
    collectives, as deadlocks need no timeout.

    Raises RankFailure when a rank raises, or the ranks do not call the same
    collectives; the next call starts clean.

        >>> def total():
        ...     x = torch.tensor([dist.get_rank() + 1.0])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> run_ranks({"dp": 2, "tp": 2}, total)
        [10.0, 10.0, 10.0, 10.0]
    """
    if _here.world is not None:
        raise ValueError("run_ranks was called by a simulated rank")
    axes = _checked(mesh, fn, backend, timeout, seed)
    task = functools.partial(_call, axes, seed, fn)
    if backend == "gloo":
        return run_on_processes(math.prod(axes.values()), task, args, timeout)
    with _lock, seldom_searched():
        return _simulated(math.prod(axes.values())).run(task, args, timeout)


def _checked(
    mesh: object, fn: object, backend: object, timeout: object, seed: object
) -> dict[str, int]:
    """Return the size of each axis, if the arguments of run_ranks make sense."""
    wanted = cast(object, mesh if isinstance(mesh, Mapping) else {"rank": mesh})
    axes = dict(cast(Mapping[object, object], wanted))
    named = all(isinstance(axis, str) for axis in axes)
    sized = all(_is_whole(size) and cast(int, size) >= 1 for size in axes.values())
    if not (axes and named and sized):
        raise ValueError(
            "mesh must be a number of ranks, or the size of each axis such as "
            f"{{'dp': 2, 'tp': 2}}, all at least 1; got {mesh!r}"
        )
    if not callable(fn):
        raise ValueError(f"fn must be a function for each rank to call; got {fn!r}")
    if backend not in ("sim", "gloo"):
        raise ValueError(f"backend must be 'sim' or 'gloo'; got {backend!r}")
    seconds = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if not seconds or not 0 < cast(float, timeout) <= threading.TIMEOUT_MAX:
        raise ValueError(f"timeout must be a positive number of seconds; got {timeout!r}")
    if not _is_whole(seed):
        raise ValueError(f"seed must be an integer; got {seed!r}")
    return cast(dict[str, int], axes)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def device_mesh(axes: Mapping[str, int] | None = None) -> DeviceMesh:
    """Return the DeviceMesh of the current `run_ranks` call, or other `axes` on its ranks.

    Meshes are kept, so a second call costs nothing. The first one is collective.
    """
    if _here.axes is None or _here.meshes is None:
        raise ValueError("device_mesh() was called outside run_ranks")
    wanted = dict(_here.axes if axes is None else axes)
    key = tuple(wanted.items())
    if key not in _here.meshes:
        if math.prod(wanted.values()) != dist.get_world_size():
            size = dist.get_world_size()
            raise ValueError(f"axes {wanted} do not make up {size} ranks")
        # All ranks or none: a mesh that only some ranks have would spoil later calls.
        cast(Any, dist).barrier()
        with unseen():  # inside typecheck() the mesh's own tensors have no type
            _here.meshes[key] = init_device_mesh(
                "cpu", tuple(wanted.values()), mesh_dim_names=tuple(wanted)
            )
    return _here.meshes[key]


def _call(
    axes: dict[str, int], seed: int, fn: Callable[..., T], args: tuple[object, ...]
) -> T:
    """Do what one rank does, in a thread or in a process."""
    _here.axes = axes
    if _here.meshes is None:
        _here.meshes = {}
    torch.default_generator.manual_seed(seed)
    try:
        result = fn(*args)
        if dist.is_initialized():
            if _here.simulation is None and len(_here.meshes) > _KEPT_ON_GLOO:
                _here.meshes.clear()
            _drop_groups(_here.meshes.values())
        else:
            _here.meshes = None
        return result
    finally:
        _here.axes = None


def _drop_groups(meshes: Any) -> None:
    """Destroy the groups that `fn` made, apart from those of kept meshes."""
    kept = [group for mesh in meshes for group in _torch.groups_of(mesh)]
    kept.append(dist.group.WORLD)
    dropped = [group for group in _torch.groups() if group not in kept]
    for group in dropped:
        dist.destroy_process_group(group)
    if dropped:
        _torch.forget_meshes_in_dtensor()


class _SimulatedWorld:
    """A pool of threads whose torch.distributed state is set up and reused."""

    def __init__(self, size: int) -> None:
        self.scheduler = Scheduler(size)
        self.simulation = Simulation(self.scheduler)
        self.worlds: list[_World] = []
        self.ready = False

    def run(
        self,
        task: Callable[[tuple[object, ...]], T],
        args: tuple[object, ...],
        timeout: float,
    ) -> list[T]:
        _torch.require("simulating")
        copies = [_copied(args) for _ in range(self.scheduler.size)]
        with _state_per_thread():
            if not self.ready:
                self.simulation.clear()
                self.worlds = self.scheduler.run(self._set_up)
            self.ready = False
            # What a program leaves set (a current mesh) ends with it.
            results = self.scheduler.run(
                lambda rank: copy_context().run(task, copies[rank]), timeout
            )
            unmatched = self.simulation.unmatched()
            if unmatched:
                pending = [["returned"] for _ in self.worlds]
                for call in unmatched:
                    pending[call.rank].append(f"without {call.describe()}")
                lines = [", ".join(of_rank) for of_rank in pending]
                raise RankFailure("some calls never met their peers", lines)
            self.simulation.clear()
            # Names of groups are numbers; all ranks must go on counting alike.
            count = max(world.group_count for world in self.worlds)
            for world in self.worlds:
                world.group_count = count
            self.ready = all(world.default_pg is not None for world in self.worlds)
        return results

    def _set_up(self, rank: int) -> _World:
        _torch.unregister_groups()
        _torch.forget_meshes_in_dtensor()
        _here.world, _here.meshes, _here.simulation = _World(), {}, self.simulation
        size = self.scheduler.size
        _here.store = SimStore(self.simulation, rank)
        dist.init_process_group("sim", store=_here.store, rank=rank, world_size=size)
        return _here.world


def _copied(args: tuple[object, ...]) -> tuple[object, ...]:
    try:
        return copy.deepcopy(args)
    except (RuntimeError, TypeError, copy.Error) as error:
        raise ValueError(
            "each rank gets a copy of the arguments, and these cannot be copied: pass "
            "tensors that are leaves (x.detach()), and make locks, files and the like "
            f"inside fn ({error})"
        ) from error


def _make_group(options: Any, backend_options: object) -> SimGroup:
    simulation = cast(Simulation, _here.simulation)
    ranks = options.global_ranks_in_group or range(options.group_size)
    return SimGroup(simulation, options.group_rank, ranks, options.group_id)


class _WorldOfThread:
    """Stands in for torch's global `_world`: each rank's thread finds its own."""

    def __init__(self, outside: object) -> None:
        object.__setattr__(self, "_outside", outside)

    def __getattr__(self, name: str) -> object:
        return getattr(_here.world or self._outside, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_here.world or self._outside, name, value)


@contextmanager
def _state_per_thread() -> Generator[None]:
    """Give each simulated rank a torch.distributed of its own, for a while."""
    outside, excepthook = _torch.distributed_globals(), sys.excepthook
    get_backend = _mesh_module.get_backend
    public = cast(Any, dist)
    monitored_barrier = public.monitored_barrier

    def named_threaded(group: Any = None) -> str:
        # DeviceMesh tells the meshes of two threads apart only for this name, and
        # DTensor's caches, shared by all threads, go wrong if it does not.
        name = get_backend(group)
        return "threaded" if name == "sim" else name

    def barrier_of_ranks(group: Any = None, *args: Any, **kwargs: Any) -> None:
        # Torch's own one insists on gloo; here every barrier names a missing rank.
        if _here.world is None:
            monitored_barrier(group, *args, **kwargs)
        else:
            public.barrier(group)

    _torch.set_distributed_globals({"_world": _WorldOfThread(outside["_world"])})
    _mesh_module.get_backend = named_threaded
    public.monitored_barrier = barrier_of_ranks
    _torch.isolate_threads(True)
    try:
        # Ranks that enter and leave catch_warnings in turn would restore it wrongly.
        with warnings.catch_warnings():
            yield
    finally:
        _torch.isolate_threads(False)
        _mesh_module.get_backend = get_backend
        public.monitored_barrier = monitored_barrier
        _torch.set_distributed_globals(outside)
        sys.excepthook = excepthook
        _torch.set_global_rank(dist.get_rank() if dist.is_initialized() else -1)


# One pool per number of ranks; the lock is there because the state that
# _state_per_thread replaces belongs to the process.
# A forked child has the pools but not their threads, so the process is in the key.
_pools: dict[tuple[int, int], _SimulatedWorld] = {}
_lock = threading.Lock()


def _simulated(size: int) -> _SimulatedWorld:
    key = (os.getpid(), size)
    if key not in _pools or not _pools[key].scheduler.usable:
        _pools[key] = _SimulatedWorld(size)
    return _pools[key]


@atexit.register
def _close_pools() -> None:
    for (process, _), pool in _pools.items():
        if process == os.getpid():
            pool.scheduler.close()
    _pools.clear()


if not _torch.has_backend("sim"):
    cast(Any, dist.Backend).register_backend(
        "sim", _make_group, extended_api=True, devices=["cpu"]
    )
