"""FSDP2, `torch.distributed.fsdp.fully_shard`: its groups of parameters; hooks of DDP.

The call itself is public. What is not: one mesh for each parameter in one call, what a
group of parameters was told to do with gradients, and when it starts.
"""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor, nn

from placements._torch.supported import inside

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_GROUPS = f"{_PACKAGE}._fsdp_param_group"

# Methods of a group in which FSDP2 computes with memory of its own.
INSIDE_A_GROUP = ("lazy_init", "unshard", "wait_for_unshard", "reshard")
# The Function that hands the inputs of a module through, to reduce after its backward.
HANDS_THROUGH = "RegisterPostBackwardFunction"


class OneParameter(NamedTuple):
    """A parameter of a group: where a module holds it, and its piece on this rank."""

    owner: nn.Module
    leaf: str
    piece: Tensor


class ShardedGroup(NamedTuple):
    """What FSDP2 does with some parameters: they are gathered and reduced together."""

    modules: tuple[nn.Module, ...]  # those that `fully_shard` was called with
    parameters: tuple[OneParameter, ...]
    mesh: Any  # the DeviceMesh over whose ranks gradients are reduced
    divides_by: float | None  # None: by the number of ranks
    reduce_dtype: Any
    waits: bool  # this backward is told to leave the sum to a later one


def mesh_for_a_parameter() -> Callable[[Any, Any], Any] | None:
    """Return what makes an answer of `shard_placement_fn` of a placement and a mesh.

    The mesh is what `mesh_info` made of a DeviceMesh. None if this torch has one mesh for
    each call.
    """
    try:
        return inside(f"{_PACKAGE}._fsdp_common.ShardPlacementResult")
    except (ImportError, AttributeError):
        return None


def mesh_info(device_mesh: Any) -> Any:
    """Return what FSDP2 makes of a mesh: of two dims the first one replicates (HSDP)."""
    return inside(f"{_PACKAGE}._fsdp_init._get_mesh_info")(device_mesh)


def is_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` was called with this very module."""
    kinds: Any = sys.modules.get("torch.distributed.fsdp")
    return kinds is not None and isinstance(module, kinds.FSDPModule)


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether a module is a wrapper of the first FSDP."""
    kinds: Any = sys.modules.get("torch.distributed.fsdp")
    return kinds is not None and isinstance(module, kinds.FullyShardedDataParallel)


def group_class() -> Any:
    """Return the class of the groups, if FSDP2 was imported."""
    found: Any = sys.modules.get(_GROUPS)
    return getattr(found, "FSDPParamGroup", None)


class Listener(NamedTuple):
    """Who is told of FSDP2's groups."""

    starts: Callable[[ShardedGroup], None]  # before the first forward
    reduces: Callable[[ShardedGroup], None]  # in backward, before gradients are reduced


_listeners: list[Listener] = []


def listen_to_groups(listener: Listener) -> None:
    _listeners.append(listener)


def watch_groups() -> None:
    """Tell the listeners of every group of FSDP2 from now on, whoever makes it.

    torch has no hook for it, so two methods of its class are wrapped. They run once for a
    group, and once for a group in each backward.
    """
    if not dist.is_available():
        return
    kind = inside(f"{_GROUPS}.FSDPParamGroup")
    if not getattr(kind.lazy_init, "is_watched", False):
        for name, told in (("lazy_init", 0), ("post_backward", 1)):
            setattr(kind, name, _telling(getattr(kind, name), told))


def _telling(method: Any, told: int) -> Any:

    @functools.wraps(method)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        for listener in _listeners:
            listener[told](_described(self))
        return method(self, *args, **kwargs)

    cast(Any, telling).is_watched = True
    return telling


def _described(group: Any) -> ShardedGroup:
    held: list[OneParameter] = []
    for one in group.fsdp_params:
        where = one._module_info
        owners = [where.module, *where.shared_modules]
        leaves = [where.param_name, *where.shared_param_names]
        held += [
            OneParameter(owner, leaf, one.sharded_param)
            for owner, leaf in zip(owners, leaves, strict=True)
        ]
    return ShardedGroup(
        tuple(group.modules),
        tuple(held),
        group.mesh_info.mesh,
        group.gradient_divide_factor,
        # A group has one for all; that of the group itself is gone in 2.15.
        group.fsdp_params[0].mp_policy.reduce_dtype,
        not group.reduce_grads
        or (group.mesh_info.mesh.ndim == 2 and not group.all_reduce_grads),
    )


def has_groups_of_parameters() -> bool:
    """Check the names of what is asked of FSDP2, in the code that sets them."""
    kind = inside(f"{_GROUPS}.FSDPParamGroup")
    one = inside(f"{_PACKAGE}._fsdp_param.FSDPParam")
    asked = {"fsdp_params", "modules", "mesh_info", "gradient_divide_factor"}
    asked |= {"reduce_grads", "all_reduce_grads"}
    places = inside(f"{_PACKAGE}._fsdp_param.ParamModuleInfo").__dataclass_fields__
    methods = (*INSIDE_A_GROUP, "post_backward")
    return (
        asked <= {*kind.__init__.__code__.co_names}
        and "mp_policy" in one.__init__.__code__.co_names
        and all(callable(getattr(kind, name, None)) for name in methods)
        and {"module", "param_name", "shared_modules", "shared_param_names"} <= {*places}
    )


def hooks_of_ddp(ddp: Any) -> list[Any]:
    """Return what DDP was told to reduce gradients by; nothing if it is to average."""
    return [hook for hook, _ in ddp._comm_hooks]


def keeps_hooks_of_ddp() -> bool:
    return "_comm_hooks" in nn.parallel.DistributedDataParallel.__init__.__code__.co_names
