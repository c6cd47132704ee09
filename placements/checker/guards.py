"""Calls that bypass the torch-function mode, and are intercepted while checking is on.

A raw collective moves data between ranks behind the types, and a compiled or scripted
function runs where no mode sees it. `patches.py` puts these functions in the place of
torch's own methods for as long as a block is open.
"""

import functools
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from placements._torch import is_eager, unseen
from placements.checker.call import tensors_in
from placements.checker.writes import count_write, reading_only
from placements.runtime import tags
from placements.runtime.callsite import in_hook_of_user, name_of
from placements.runtime.describe import described
from placements.runtime.errors import PlacementError, refused_call
from placements.runtime.mesh import checked_mesh, current_mesh
from placements.runtime.state import current, suspended
from placements.types.axis import R
from placements.types.tensor import TensorType

# Start of the name of a raw collective, underscores left out -> the typed call for it.
TYPED_CALLS: tuple[tuple[str, str], ...] = (
    ("allreduce", "all_reduce(x, axis, src=P, dst=R)"),
    ("allgather", "all_gather(x, axis, src=S(0), dst=R)"),
    ("reducescatter", "reduce_scatter(x, axis, src=P, dst=S(0))"),
    ("alltoall", "all_to_all(x, axis, src=V, dst=V)"),
    ("broadcast", "all_reduce(convert(x, axis, src=R, dst=P), axis, src=P, dst=R)"),
    ("scatter", "convert(x, axis, src=R, dst=S(0))"),
    ("gather", "all_gather(x, axis, src=S(0), dst=R)"),
    ("reduce", "all_reduce(x, axis, src=P, dst=R)"),
    ("redistribute", "redistribute(x, axis, src=P, dst=R)"),
    ("object", "all_gather(x, axis, src=V, dst=R), of a tensor"),
    ("send", "all_to_all(x, axis, src=V, dst=V)"),
    ("recv", "all_to_all(x, axis, src=V, dst=V)"),
)


def refusing_objects(to_tensor: Any) -> Any:
    """Wrap the function that makes tensors of objects: refuse it like a raw collective."""

    def refusing(*args: Any) -> Any:
        mode = current.mode
        if mode is not None and not mode.lenient:
            raise raw_collective("object collective")
        return to_tensor(*args)

    return refusing


def refusing(name: str, original: Any) -> Any:
    """Wrap a method of a process group: refuse it in checked code and in hooks."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = current.mode
        checked = mode is not None and not mode.lenient
        if checked or (current.in_backward and in_hook_of_user()):
            raise raw_collective(name, self, args)
        result = original.__get__(self, type(self))(*args, **kwargs)
        if current.is_opaque and not name.startswith("send"):
            count_write(args[0] if args else None)
        return result

    return method


def typed_call(name: str) -> str | None:
    """Return the typed call that replaces a raw collective; None if the name is not one."""
    plain = name.replace("_", "").lower()
    for start, call in TYPED_CALLS:
        if plain.startswith(start):
            return call
    return None


def raw_collective(
    name: str, group: Any = None, args: tuple[Any, ...] = ()
) -> PlacementError:
    """Return the error for a collective that bypasses the types."""
    typed = typed_call(name) or "all_reduce(x, axis, src=P, dst=R)"
    tensors = list(tensors_in(args))
    what = next((found for found in map(name_of, tensors) if found), "")
    axis = _axis_of(group) if args else None
    kinds = (dist.ReduceOp, dist.ReduceOp.RedOpType)
    said = [getattr(a, "reduceOp", a) for a in args]
    averages = any(isinstance(op, kinds) and op == dist.ReduceOp.AVG for op in said)
    return refused_call(
        name,
        "a raw torch.distributed collective"
        + (f" on {what}" if what else "")
        + (f" over axis {axis!r}" if axis else "")
        + " inside typecheck()",
        name=what or name,
        axis=axis,
        rule="reductions are sums here: what a gradient is divided by is part of the loss"
        if averages
        else "it changes types and gradients without saying how",
        operands=[described(t) for t in tensors],
        advice="global_mean(total, count, axes) in the loss; reduce_gradients(module)"
        if averages
        else f"placements.{typed}",
    )


def _axis_of(group: Any) -> str | None:
    """Return the axis of the current mesh whose ranks a group has."""
    mesh = checked_mesh()
    if mesh.device_mesh is None:
        return None
    if group is None:  # all ranks
        return mesh.axes[0] if len(mesh.axes) == 1 else None
    names = {axis: cast(Any, mesh.group(axis)).group_name for axis in mesh.axes}
    found = getattr(group, "group_name", None)
    return next((axis for axis, name in names.items() if name == found), None)


def refusing_weight(l1_loss: Any) -> Any:
    """`F.l1_loss` that refuses its weight, which torch drops under such a mode."""

    @functools.wraps(l1_loss)  # torch hands this function on where the mode looks it up
    def refusing_weight(*args: Any, **kwargs: Any) -> Any:
        weight = kwargs.get("weight", args[5] if len(args) > 5 else None)
        if current.mode is not None and weight is not None:
            raise refused_call(
                "l1_loss",
                "torch does not hand the argument 'weight' on while a mode is active",
                name="weight",
                rule="the loss would be computed without its weight",
                advice="(weight * (input - target).abs()).sum()",
            )
        return l1_loss(*args, **kwargs)

    return refusing_weight


def compiling_later(compile: Any) -> Any:
    """`torch.compile` whose function runs as it is written while checking is on."""

    def compiling_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(compiling_later, **options)
        if isinstance(model, nn.Module):
            if current.mode is not None and not is_eager():
                raise refused_call(
                    "torch.compile",
                    "a module that is compiled inside a block would be traced with the "
                    "checker in it",
                    name=type(model).__name__,
                    rule="code in a block runs as it is written",
                    advice="compile the module before the block; it runs as it is written "
                    "inside",
                )
            return compile(model, **options)
        compiled = compile(model, **options)

        @functools.wraps(model)
        def called(*args: Any, **kwargs: Any) -> Any:
            return (compiled if current.mode is None else model)(*args, **kwargs)

        return called

    return compiling_later


def watched_script(call: Any) -> Any:
    """Return the call of a scripted function, which must not write what it is given."""

    def watched_script(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current.mode is None:
            return call.__get__(self, type(self))(*args, **kwargs)
        with reading_only(
            getattr(self, "name", "a scripted function"), (*args, *kwargs.values())
        ):
            return call.__get__(self, type(self))(*args, **kwargs)

    return watched_script


def apart(method: Any) -> Any:
    """Wrap a function whose tensors are its own, as those of a DeviceMesh: no types."""

    @functools.wraps(method)
    def apart(*args: Any, **kwargs: Any) -> Any:
        with suspended(), unseen():
            return method(*args, **kwargs)

    return apart


def ranks_of_mesh(mesh: Any) -> Any:
    """`DeviceMesh.mesh`: the numbers of all ranks are Replicate; those of some differ."""

    def ranks(self: Any) -> Tensor:
        with suspended(), unseen():
            found: Tensor = mesh.__get__(self, type(self))
        here = None if current.mode is None else current_mesh()
        if here is not None and found.numel() == here.num_ranks:
            tags.put(found, TensorType(here, (R,) * len(here.axes)))
        return found

    return property(ranks)
