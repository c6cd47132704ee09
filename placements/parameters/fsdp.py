"""`fully_shard`: FSDP2, with the ranks, the dim and the sum read from declared types.

A parameter can be sharded over the axes on which it is Replicate: there the ranks hold the
same values, and each adds a summand to the gradient. FSDP2 then sums the gradient over
these axes. `reduce_gradients` sums it over the others, such as tp.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from placements._torch import (
    base_of,
    in_transform,
    is_sharded,
    mesh_for_a_parameter,
    mesh_info,
    pytree,
    require,
    unseen,
)
from placements.parameters.fsdp_meshes import mesh_over
from placements.parameters.held import Held, Meshes, all_parameters, meshes_or_current
from placements.parameters.stale import mark_replaced, refuse_stale
from placements.runtime.errors import refused
from placements.runtime.state import suspended
from placements.types.axis import R
from placements.types.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

M = TypeVar("M", bound=nn.Module)

# The axes over which batches are cut: ranks hold equal parameters, and own data.
DATA_AXES = ("dp", "cp", "edp")

# Axes of whose ranks all hold whole copies, or for an axis, how many copies there are.
Copies: TypeAlias = "Sequence[str] | Mapping[str, int]"


def fully_shard(
    module: M,
    *,
    meshes: Meshes = None,
    shard: Sequence[str] = DATA_AXES,
    replicate: Copies = (),
    mp_policy: "MixedPrecisionPolicy | None" = None,
    offload_policy: "OffloadPolicy | None" = None,
    reshard_after_forward: bool | int | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> M:
    """Shard a module by FSDP2 (`torch.distributed.fsdp.fully_shard`), as its types say.

    Each parameter is sharded over the axes of `shard` on which it is Replicate, and
    gradients are summed over them. Axes in `replicate` are summed over too, but their ranks
    hold whole copies (HSDP); with a number, `replicate={"dp": 2}`, the ranks of the axis
    hold so many copies, and each copy is sharded over the others. `meshes` as for
    `reduce_gradients`, which is to be called after backward as ever: it sums over the axes
    that are left, in the `reduce_dtype` of `mp_policy`.

    A parameter is cut along its first dim; if that has fewer rows than there are shards,
    and they divide the second, along the second. Call it for each block, and last for the
    whole model, as torch's. The other arguments are torch's. Returns the module, which has
    the methods of torch's FSDPModule; on one device it stays as it is.
    Communicates: makes process groups at the first call for a mesh, so all ranks call it.
    Raises PlacementError for a parameter without a declared type, ValueError if a mesh has
    no process groups.
    """
    call = "fully_shard"
    require("sharding")
    known = meshes_or_current(call, meshes)
    copies = _copies(known, replicate)
    ignored = set(ignored_params)
    _check_axes(known, shard, copies)
    with unseen(), suspended():
        held = [h for h in all_parameters(call, module, known) if h.tensor not in ignored]
        below = _sharded_below(module)
        held = [one for one in held if id(one.tensor) not in below]
        refuse_stale(call, module, held)
        plans = {cast(nn.Parameter, h.tensor): _plan(h, shard, copies) for h in held}
        if all(mesh.num_ranks == 1 and mesh.device_mesh is None for mesh in known):
            return module
        options: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "ignored_params": ignored or None,
            "mp_policy": mp_policy,
            "offload_policy": offload_policy,
        }
        options = {name: value for name, value in options.items() if value is not None}
        _apply(module, plans, known[0], options)
        mark_replaced(module, held)
    return module


class Plan(NamedTuple):
    """Which ranks hold shards of a parameter, and along which dim it is cut."""

    device_mesh: DeviceMesh
    dim: int


def shard_dim(shape: Sequence[int], shards: int) -> int:
    """Return the dim along which to cut a tensor: 0, unless it has too few rows for all.

    `shape` is what a rank holds without FSDP2. For experts that are cut over ep this is the
    rule that (shards * ep) > experts means dim 1. FSDP2 cuts other dims than 0 evenly only.
    """
    if len(shape) < 2 or shape[0] >= shards or shape[1] == 0 or shape[1] % shards:
        return 0
    return 1


def _copies(meshes: Sequence[Mesh], replicate: Copies) -> dict[str, int]:
    """Return for each axis how many whole copies its ranks hold."""
    if isinstance(replicate, str):
        raise TypeError(f"fully_shard: replicate=({replicate!r},), not {replicate!r}")
    sizes = {axis: n for mesh in meshes for axis, n in mesh.sizes.items()}
    if not isinstance(replicate, Mapping):
        return {axis: sizes.get(axis, 1) for axis in replicate}
    for axis, count in replicate.items():
        if count < 1 or sizes.get(axis, count) % count:
            raise ValueError(
                f"fully_shard: replicate={dict(replicate)}: the {sizes.get(axis)} ranks of "
                f"axis {axis!r} cannot hold {count} copies"
            )
    return dict(replicate)


def _check_axes(
    meshes: Sequence[Mesh], shard: Sequence[str], copies: Mapping[str, int]
) -> None:
    """Raise ValueError for an axis that no mesh has, if the caller chose it."""
    if isinstance(shard, str):
        raise TypeError(f"fully_shard: shard=({shard!r},), not {shard!r}")
    chosen = [*(() if shard is DATA_AXES else shard), *copies]
    there = {axis for mesh in meshes for axis in mesh.sizes}
    for axis in chosen:
        if there and axis not in there:
            raise ValueError(
                f"fully_shard: no mesh has the axis {axis!r}; there are {sorted(there)}"
            )


def _sharded_below(module: nn.Module) -> set[int]:
    """Return the ids of the parameters that an earlier call took, in a module below."""
    taken: set[int] = set()
    for one in module.modules():
        if one is not module and is_sharded(one):
            taken.update(id(p) for p in one.parameters())
    return taken


def _plan(held: Held, shard: Sequence[str], copies: Mapping[str, int]) -> Plan | None:
    mesh = held.type.mesh
    if mesh.device_mesh is None:
        if mesh.num_ranks > 1:
            raise ValueError(
                f"fully_shard: {held.name!r} lives on {mesh!r}, which is sizes alone; "
                "sharding needs process groups: meshes=(a DeviceMesh, ...)"
            )
        return None
    if held.tensor.dim() == 0:
        raise refused(
            "fully_shard", f"{held.name!r} has no dim along which it could be cut",
            name=held.name, advice="make it a tensor of one element, or put it into "
            "ignored_params: reduce_gradients sums what FSDP2 does not",
        )  # fmt: skip
    axes = [
        axis
        for axis in mesh.axes
        if (axis in shard or axis in copies) and held.type[axis] == R
    ]
    device_mesh = mesh_over(mesh, axes, copies)
    shards = device_mesh.size(device_mesh.ndim - 1)
    return Plan(device_mesh, shard_dim(tuple(held.tensor.shape), shards))


def _apply(
    module: nn.Module,
    plans: Mapping[nn.Parameter, Plan | None],
    mesh: Mesh,
    options: dict[str, Any],
) -> None:
    """Call torch's function: once, or first for modules whose parameters go elsewhere."""
    meshes = [plan.device_mesh for plan in plans.values() if plan is not None]
    assert mesh.device_mesh is not None
    if not meshes:
        main = mesh_over(mesh, [a for a in mesh.axes if a in DATA_AXES], {})
    else:
        main = max(meshes, key=meshes.count)
    others: list[DeviceMesh] = []
    for one in meshes:
        if one is not main and all(one is not other for other in others):
            others.append(one)
    answer = mesh_for_a_parameter() if others else None
    if others and answer is None:
        for part, other in _parts(module, plans, main):
            _shard(part, other, _dims(plans), options)
        _shard(module, main, _dims(plans), options)
    elif answer is None:
        _shard(module, main, _dims(plans), options)
    else:
        _shard(module, main, _dims_and_meshes(plans, main, answer), options)


def _shard(
    module: nn.Module, mesh: DeviceMesh, placed: Callable[[nn.Parameter], Any], options: Any
) -> None:
    from torch.distributed import fsdp  # only where it is in use

    module.register_forward_hook(_own_memory)
    fsdp.fully_shard(module, mesh=mesh, shard_placement_fn=placed, **options)
    module.register_forward_pre_hook(_outside_transforms, prepend=True)
    sharded = cast(fsdp.FSDPModule, module)
    # A sum, whatever the backend: gloo, for one, does not scale what it sums.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _outside_transforms(module: nn.Module, args: Any) -> None:
    """Refuse what FSDP2 would fail at: it gathers the parameters that the module has."""
    if in_transform():
        raise RuntimeError(
            "FSDP2 gathers the parameters of the module, and not those that a transform "
            "of torch.func (grad, jvp, vmap) gives it: use loss.backward() or "
            "torch.autograd.grad, or leave out fully_shard"
        )


def _own_memory(module: nn.Module, args: Any, output: Any) -> Any:
    """Copy a result that is a view, before FSDP2 puts a hook on it that backward needs.

    A write to the view (`y += x`) would take the hook away.
    """

    def copied(x: Tensor) -> Tensor:
        is_view = torch.is_grad_enabled() and x.requires_grad and base_of(x) is not None
        return x.clone() if is_view else x

    return pytree.tree_map_only(Tensor, copied, output)


def _dims(plans: Mapping[nn.Parameter, Plan | None]) -> Callable[[nn.Parameter], Any]:
    from torch.distributed.tensor import Shard

    def placed(parameter: nn.Parameter) -> Any:
        plan = plans.get(parameter)
        return None if plan is None else Shard(plan.dim)

    return placed


def _dims_and_meshes(
    plans: Mapping[nn.Parameter, Plan | None], main: DeviceMesh, answer: Callable[..., Any]
) -> Callable[[nn.Parameter], Any]:
    from torch.distributed.tensor import Shard

    infos: dict[int, Any] = {}  # torch wants one object for each mesh

    def placed(parameter: nn.Parameter) -> Any:
        plan = plans.get(parameter)
        if plan is None or plan.device_mesh is main:
            return None if plan is None else Shard(plan.dim)
        if id(plan.device_mesh) not in infos:
            infos[id(plan.device_mesh)] = mesh_info(plan.device_mesh)
        return answer(Shard(plan.dim), infos[id(plan.device_mesh)])

    return placed


def _parts(
    module: nn.Module, plans: Mapping[nn.Parameter, Plan | None], main: DeviceMesh
) -> Iterator[tuple[nn.Module, DeviceMesh]]:
    """Yield the largest modules below all of whose parameters go to one other mesh."""
    for name, child in module.named_children():
        if is_sharded(child):
            continue
        found = [plan.device_mesh for p in child.parameters() if (plan := plans.get(p))]
        if not found or all(one is main for one in found):
            continue
        if all(one is found[0] for one in found) and _is_called(child):
            yield child, found[0]
            continue
        own = [plans.get(p) for p in child.parameters(recurse=False)]
        if any(plan is not None and plan.device_mesh is not main for plan in own):
            raise _mixed(name)
        yield from _parts(child, plans, main)


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _mixed(name: str) -> ValueError:
    return ValueError(
        f"fully_shard: the parameters of {name!r} are to be sharded over different ranks, "
        f"and torch {torch.__version__} has one mesh for each module: hold them in modules "
        "of their own"
    )
