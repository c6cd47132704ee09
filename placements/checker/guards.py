"""Calls that bypass the torch-function mode, and are intercepted while checking is on.

`autograd.Function.apply` hides a backward that nobody checked, and a raw collective moves
data between ranks behind the types. `patches.py` puts these functions in the place of
torch's own methods for as long as a block is open.
"""

import functools
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from placements._torch import is_eager, unseen
from placements.checker.writes import count_write, reading_only
from placements.runtime import tags
from placements.runtime.callsite import in_hook_of_user, name_of
from placements.runtime.declared import declared
from placements.runtime.describe import described
from placements.runtime.errors import PlacementError, padded_at, refused_call
from placements.runtime.mesh import checked_mesh
from placements.runtime.state import current, observer, suspended
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

# Functions of torch whose backward is the backward of the checked ops inside them.
TRANSPARENT = frozenset({"CheckpointFunction"})

# Start of the names that torch gives the Function inside a custom op: the op itself is in
# the table, or it would have been refused.
OF_A_CUSTOM_OP = "GeneratedBackwardFor_"


def checked_function(apply: Any) -> Any:
    """A `Function.apply` that asks what the Function does to placements.

    torch 2.13 has a classmethod there, torch 2.14 and later a C method; both bind to a
    class.
    """

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = apply.__get__(None, cls)
        mode = current.mode
        if mode is None or mode.lenient or _is_transparent(cls):
            return original(*args, **kwargs)
        return _checked_apply(original, cls, args, kwargs)

    return classmethod(checked)


def _is_transparent(cls: Any) -> bool:
    return cls.__name__ in TRANSPARENT or cls.__name__.startswith(OF_A_CUSTOM_OP)


def _checked_apply(original: Any, cls: Any, args: Any, kwargs: Any) -> Any:
    rule = getattr(cls, "placement_rule", None)
    is_torch = cls.__module__.startswith("torch.distributed")
    if rule is None and is_torch and typed_call(cls.__name__) is not None:
        raise raw_collective(cls.__name__)
    if rule is None:
        raise refused_call(
            f"{cls.__name__}.apply",
            "this autograd.Function does not say what it does to placements",
            name=cls.__name__,
            rule="its backward is not checked, so its types must be declared",
            advice="give it a staticmethod placement_rule(*types) that returns the type "
            "of the result (tensors' types for tensors, other arguments as they are), "
            "or call it in a region",
        )
    types = [tags.get(a) if isinstance(a, Tensor) else a for a in args]
    for arg, known in zip(args, types, strict=True):
        if isinstance(known, TensorType) and known.pads:
            raise padded_at(f"{cls.__name__}.apply", arg, known)
    found = rule(*types)
    with reading_only(f"{cls.__name__}.apply", args) as returned:
        with suspended(), unseen():
            result: Any = original(*args, **kwargs)
        returned.extend(_tag_results(cls, result, found))
    return result


def _tag_results(cls: Any, result: Any, found: Any) -> list[Tensor]:
    results, types = _as_tuple(result), _as_tuple(found)
    if len(types) != len(results):
        raise PlacementError(
            f"{cls.__name__}.placement_rule gave {len(types)} types for {len(results)} "
            "results",
            where=f"{cls.__name__}.apply",
        )
    tensors: list[Tensor] = []
    for tensor, said in zip(results, types, strict=True):
        if isinstance(tensor, Tensor):
            is_type = isinstance(said, TensorType)
            shape = tuple(tensor.shape)
            tags.put(tensor, said if is_type else declared(checked_mesh(), said, shape))
            tensors.append(tensor)
            watcher = observer()
            if watcher is not None:
                where = f"{cls.__name__}.apply"
                watcher.crossing(where, "result", tensor, tags.get(tensor))
    return tensors


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return cast(Any, value) if isinstance(value, tuple) else (value,)


def refusing_objects(to_tensor: Any) -> Any:
    """The function that makes tensors of Python objects, refused like raw collectives."""

    def refusing(*args: Any) -> Any:
        mode = current.mode
        if mode is not None and not mode.lenient:
            raise raw_collective("object collective")
        return to_tensor(*args)

    return refusing


def refusing(name: str, original: Any) -> Any:
    """A method of a process group, refused in checked code and in hooks of backward."""

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
    """The typed call that stands for a raw collective; None if the name is not one."""
    plain = name.replace("_", "").lower()
    for start, call in TYPED_CALLS:
        if plain.startswith(start):
            return call
    return None


def raw_collective(
    name: str, group: Any = None, args: tuple[Any, ...] = ()
) -> PlacementError:
    """The error for a collective that bypasses the types."""
    typed = typed_call(name) or "all_reduce(x, axis, src=P, dst=R)"
    tensors = _tensors_in(args)
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


def _tensors_in(args: Any) -> list[Tensor]:
    if isinstance(args, Tensor):
        return [args]
    several = isinstance(args, list | tuple)
    return [t for a in cast(Any, args) for t in _tensors_in(a)] if several else []


def _axis_of(group: Any) -> str | None:
    """The axis of the current mesh whose ranks a group has."""
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
    """The call of a scripted function, which must not write what it is given."""

    def watched_script(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current.mode is None:
            return call.__get__(self, type(self))(*args, **kwargs)
        with reading_only(
            getattr(self, "name", "a scripted function"), (*args, *kwargs.values())
        ):
            return call.__get__(self, type(self))(*args, **kwargs)

    return watched_script
