"""The process groups of torch.distributed, and what DTensor keeps of them."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import sys
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from placements._torch.supported import inside, unsupported

_C: Any = torch._C

# The collectives under torch's functional ones, which `torch.compile`, the fake backend and
# autograd all accept.
functional: Any = torch.ops._c10d_functional

# The function by which every collective of Python objects makes tensors of them.
OBJECT_TO_TENSOR = "_object_to_tensor"

# The timeout in the options of a backend.
TIMEOUT = "_timeout"

# What torch.distributed keeps once per process; the simulator has it once per rank.
_GLOBALS = ("_world", "_backend", "_default_pg_init_method")


def distributed_globals() -> dict[str, Any]:
    return {name: getattr(dist.distributed_c10d, name) for name in _GLOBALS}


def set_distributed_globals(values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(dist.distributed_c10d, name, value)


def on_many_ranks() -> bool:
    """Return whether there are process groups, and more ranks than this one."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def world() -> Any:
    """Return what torch.distributed keeps of groups, in a process that has none."""
    made: Any = dist.distributed_c10d._World()
    return made


def groups() -> list[Any]:
    """Return all process groups of this process, or of this simulated rank."""
    return list(distributed_globals()["_world"].pg_map)


def groups_of(device_mesh: Any) -> list[Any]:
    """Return the process groups that a DeviceMesh made for its axes."""
    registry = getattr(device_mesh, "_pg_registry", None)  # of an object: no probe finds it
    if registry is None:
        raise unsupported(["DeviceMesh._pg_registry (to keep the groups of a mesh)"])
    return list(registry.values())


def timeout_of(group: Any, device_type: str) -> timedelta | None:
    """Return how long ranks of a group wait for each other; None if that is not said.

    The backend of simulated ranks has no timeout: it sees a deadlock at once.
    """
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, TIMEOUT, None)


def device_mesh_over(
    device_type: str, ranks: Tensor, names: tuple[str, ...], timeout: timedelta | None
) -> DeviceMesh:
    """Make a mesh of these ranks, whose groups have this timeout; None: that of torch.

    DeviceMesh itself gives its groups torch's default, 30 minutes, whatever the timeout of
    the process group that they are made in. Process groups are made, so all ranks must call
    this together.
    """
    if timeout is None:
        return DeviceMesh(device_type, ranks, mesh_dim_names=names)
    groups = [
        _group_of(ranks.movedim(dim, -1), f"mesh_{name}", timeout)
        for dim, name in enumerate(names)
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)


def _group_of(ranks: Tensor, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """Make a group of each row of ranks; return the one that this rank is in."""
    rows = cast(Any, ranks.reshape(-1, ranks.shape[-1])).tolist()
    mine, _ = cast(Any, dist).new_subgroups_by_enumeration(
        rows, timeout=timeout, group_desc=name
    )
    return mine


def unregister_groups() -> None:
    _C._distributed_c10d._unregister_all_process_groups()


def isolate_threads(isolated: bool) -> None:
    """Let each thread find only the process groups that it registered itself, or all."""
    _C._distributed_c10d._set_thread_isolation_mode(isolated)


def set_global_rank(rank: int) -> None:
    _C._distributed_c10d._set_global_rank(rank)


def has_backend(name: str) -> bool:
    plugins: Any = dist.Backend._plugins
    return name.upper() in plugins


def forget_meshes_in_dtensor() -> None:
    """Clear what DTensor remembers: results with their mesh, hence with dead groups."""
    if "torch.distributed.tensor" in sys.modules:
        inside("torch.distributed.tensor.debug._clear_sharding_prop_cache")()


def explicit_redistribution(**options: Any) -> Any:
    """Return a block in which DTensor raises where it would communicate by itself."""
    context = inside("torch.distributed.tensor._utils.ExplicitRedistributionContext")
    return context(**options)


def fake_store() -> Any:
    """Return the store of a process group that sends nothing."""
    return inside("torch.testing._internal.distributed.fake_pg.FakeStore")()
