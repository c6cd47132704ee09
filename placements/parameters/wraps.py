"""FSDP2 and DDP around typed modules: a wrap that contradicts the types is refused.

Such a wrap reduces gradients by itself, over the ranks that it was given. It is right if
these are the ranks of axes on which the parameters are Replicate, and if it sums. Nothing
of torch looks at that, and values are wrong without a word. So each wrap is looked at when
it starts, whoever made it and whether or not checking is on; nothing is done per forward.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from placements._torch import (
    Listener,
    ShardedGroup,
    hooks_of_ddp,
    is_fsdp1,
    listen_to_groups,
    modules_below,
    unseen,
)
from placements.runtime import tags
from placements.runtime.dtensors import axes_with, ranks_in
from placements.runtime.errors import PlacementError, refused
from placements.runtime.gradient_notes import forget, note_of, put_note
from placements.runtime.gradient_watch import was_zeroed
from placements.runtime.mesh import said_meshes
from placements.runtime.state import suspended
from placements.runtime.tags import declarations
from placements.types.axis import TypesLike
from placements.types.mesh import Mesh, live_meshes
from placements.types.text import as_axis_type

_RIGHT = (
    "placements.fully_shard(module, meshes=...), which reads all of this from the types"
)


class _Wrapped(NamedTuple):
    """A parameter with a declared type, in modules that are wrapped together."""

    modules: Sequence[nn.Module]
    owner: nn.Module
    leaf: str
    said: TypesLike
    tensor: Tensor

    @property
    def name(self) -> str:
        for module in self.modules:
            for path, one in _named_modules(module):
                if one is self.owner:
                    return f"{path}.{self.leaf}" if path else self.leaf
        return self.leaf


def _named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast(Any, module).named_modules()


def _group_starts(group: ShardedGroup) -> None:
    with unseen(), suspended():
        ranks = ranks_in(group.mesh)
        for one in _in_group(group):
            _check_ranks("fully_shard", one, ranks)
        _check_sum(group)


def _group_reduces(group: ShardedGroup) -> None:
    with unseen(), suspended():
        _check_sum(group)
        for one in _in_group(group):
            if group.reduce_dtype is not None:
                tags.put_reduce_dtype(one.tensor, group.reduce_dtype)
            tags.put_waits(one.tensor, group.waits and one.tensor.requires_grad)
            _comes_after(one.tensor.grad)


def _comes_after(grad: Tensor | None) -> None:
    """Note on a gradient that FSDP2 now adds to it, if `reduce_gradients` reduced it.

    For autograd this is no accumulation, so nothing else sees it.
    """
    note = None if grad is None else note_of(grad)
    if grad is None or note is None:
        return
    if was_zeroed(grad):
        forget(grad)
    elif note.by_us:
        put_note(grad, note.in_trouble("added to"))


def _in_group(group: ShardedGroup) -> Iterator[_Wrapped]:
    for owner, leaf, piece in group.parameters:
        said = declarations(owner).get(leaf)
        if said is not None:
            yield _Wrapped(group.modules, owner, leaf, said, piece)


def _check_sum(group: ShardedGroup) -> None:
    ranks = group.mesh.size()
    if ranks == 1 or group.divides_by == 1.0:
        return
    for one in _in_group(group):
        if one.tensor.requires_grad:
            call = (
                "module.set_gradient_divide_factor(1.0) and "
                "module.set_force_sum_reduction_for_comms(True) after torch's fully_shard; "
                "or " + _RIGHT
            )
            raise _averages("fully_shard", one.name, group.divides_by or ranks, call)


def _averages(where: str, name: str, by: float, advice: str) -> PlacementError:
    return refused(
        where,
        f"the gradient of {name!r} is to be divided by {by:g}, expected a sum over ranks",
        name=name,
        expected="a sum",
        actual=f"a sum divided by {by:g}",
        rule="where a parameter is Replicate the gradients of the ranks are summands; what "
        "a loss divides by is part of the loss (global_mean)",
        advice=advice,
    )


def _gets_child(parent: nn.Module, name: str, child: Any) -> None:
    """Look at a module that DDP wraps, before DDP sends rank 0's values to all ranks."""
    if name not in ("module", "_fsdp_wrapped_module"):
        return
    if is_fsdp1(parent):
        _check_fsdp1(child)
    if not isinstance(parent, nn.parallel.DistributedDataParallel):
        return
    ranks = frozenset(dist.get_process_group_ranks(cast(Any, parent).process_group))
    if len(ranks) == 1:
        return
    with unseen(), suspended():
        said: Any = getattr(child, "_ddp_params_and_buffers_to_ignore", ())
        left_out = set(cast(Iterable[str], said))
        held = [o for o in _in_module(child) if not left_out or o.name not in left_out]
        for one in held:
            _check_ranks("DDP", one, ranks)
            tags.put_summed_ranks(one.tensor, ranks)
    if held:
        parent.register_forward_pre_hook(_check_hook_of_ddp)


def _check_fsdp1(module: nn.Module) -> None:
    one = next(_in_module(module), None)
    if one is not None and dist.get_world_size() > 1:
        raise refused(
            "FullyShardedDataParallel",
            f"{one.name!r} has a declared type, which nothing can follow here",
            name=one.name,
            rule="it puts all parameters into one, and divides gradients by the number of "
            "ranks, where the type of a parameter may say otherwise",
            advice=_RIGHT,
        )


def _in_module(module: nn.Module) -> Iterator[_Wrapped]:
    for owner in modules_below(module):
        for leaf, said in declarations(owner).items():
            tensor = getattr(owner, leaf, None)
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                yield _Wrapped([module], owner, leaf, said, tensor)


# Where torch has hooks for DDP, all of which divide by the number of ranks.
_HOOKS_OF_TORCH = "torch.distributed.algorithms"


def _check_hook_of_ddp(ddp: Any, args: Any) -> None:
    """Raise unless somebody told DDP to reduce by other means than an average."""
    hooks = hooks_of_ddp(ddp)
    own = [h for h in hooks if not getattr(h, "__module__", "").startswith(_HOOKS_OF_TORCH)]
    if own:
        return
    with unseen(), suspended():
        name = next(iter(_in_module(ddp.module))).name
        raise _averages(
            "DDP", name, ddp.process_group.size(),
            "leave DDP out, reduce_gradients(module, meshes=...) sums; or give DDP a hook "
            "that sums: ddp.register_comm_hook(...); or " + _RIGHT,
        )  # fmt: skip


def _check_ranks(where: str, one: _Wrapped, ranks: frozenset[int]) -> None:
    """Raise unless the parameter is Replicate on the axes that the ranks are those of.

    Its type names the axes of a mesh: one that its module says its parameters live on
    (`module.meshes`), or one that is current, or else any mesh of this rank.
    """
    said: Any = vars(one.owner).get("meshes", ())
    stated = cast(tuple[Any, ...], said if isinstance(said, tuple) else ())
    sure = [mesh for mesh in [*stated, *said_meshes.all()] if _fits(mesh, one)]
    meshes = sure[:1] or [mesh for mesh in live_meshes() if _fits(mesh, one)]
    wrong = [_contradiction(where, one, mesh, ranks) for mesh in meshes]
    if wrong and all(error is not None for error in wrong):
        raise cast(PlacementError, wrong[0])


def _fits(mesh: Any, one: _Wrapped) -> TypeGuard[Mesh]:
    """Return whether the type of a parameter is one on this mesh of process groups."""
    if not isinstance(mesh, Mesh) or mesh.device_mesh is None or not mesh.axes:
        return False
    return all(axis in one.said for axis in mesh.axes)


def _contradiction(
    where: str, one: _Wrapped, mesh: Mesh, ranks: frozenset[int]
) -> PlacementError | None:
    over = axes_with(mesh, ranks)
    if over is None:
        return refused(
            where,
            f"{one.name!r} is wrapped over the ranks {sorted(ranks)}, which are not those "
            f"of any axes of {mesh!r}",
            name=one.name, rule=_SAME, advice=_RIGHT,
        )  # fmt: skip
    for axis in over:
        said = as_axis_type(one.said[axis])
        if said.letter != "R":
            return refused(
                where,
                f"{one.name!r} is wrapped over the ranks of axis {axis!r}, on which it is "
                f"{said!r}, expected Replicate",
                name=one.name, axis=axis, expected="Replicate", actual=repr(said),
                rule=_REASONS.get(said.letter, _SAME), advice=_RIGHT,
            )  # fmt: skip
    return None


_SAME = "only ranks that hold the same parameter can share it, and sum its gradient"
_REASONS = {
    "S": "the ranks of that axis hold different pieces, which would be taken for one "
    "parameter: values and gradients of different pieces would be mixed",
    "V": "the ranks of that axis hold parameters of their own",
    "I": "every rank has the whole gradient already: a sum counts it once for every rank",
}


def look_at_wraps() -> None:
    """Look at every wrap from now on."""
    listen_to_groups(Listener(_group_starts, _group_reduces))
    register_module_module_registration_hook(_gets_child)
