"""Doors that a torch-function mode does not see, watched while checking is on.

`autograd.Function.apply` hides a backward that nobody checked, and a raw collective
moves data between ranks behind the types. Both are found by replacing the methods that
every such call goes through, for as long as any thread checks.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from placements import tags
from placements.callsite import caller
from placements.describe import checked_mesh
from placements.errors import PlacementError
from placements.state import current, suspended
from placements.tensor_type import TensorType, declared
from placements.torch_private import unseen

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
    ("send", "all_to_all(x, axis, src=V, dst=V)"),
    ("recv", "all_to_all(x, axis, src=V, dst=V)"),
)

# Functions of torch whose backward is the backward of the checked ops inside them.
TRANSPARENT = frozenset({"CheckpointFunction"})

# Start of the names that torch gives the Function inside a custom op: the op itself is in
# the table, or it would have been refused.
OF_A_CUSTOM_OP = "GeneratedBackwardFor_"

_lock = threading.Lock()
_watchers = 0
_undo: list[Callable[[], None]] = []


@contextmanager
def doors_watched() -> Generator[None]:
    """Watch the doors until the block ends; blocks may nest and run in many threads."""
    global _watchers
    with _lock:
        _watchers += 1
        if _watchers == 1:
            _watch_functions()
            _watch_collectives()
    try:
        yield
    finally:
        with _lock:
            _watchers -= 1
            if _watchers == 0:
                while _undo:
                    _undo.pop()()


def _replace(owner: Any, name: str, new: Any) -> None:
    # The entry of the class's own dict, not what getattr makes of it: that is what has
    # to come back.
    old = owner.__dict__[name]
    setattr(owner, name, new)
    _undo.append(lambda: setattr(owner, name, old))


def _watch_functions() -> None:
    original: Any = torch.autograd.Function.__dict__["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if current.mode is None or current.mode.lenient or _is_transparent(cls):
            return original(cls, *args, **kwargs)
        return _checked_apply(original, cls, args, kwargs)

    _replace(torch.autograd.Function, "apply", classmethod(apply))


def _is_transparent(cls: Any) -> bool:
    return cls.__name__ in TRANSPARENT or cls.__name__.startswith(OF_A_CUSTOM_OP)


def _checked_apply(original: Any, cls: Any, args: Any, kwargs: Any) -> Any:
    rule = getattr(cls, "placement_rule", None)
    if rule is None:
        raise PlacementError(
            f"{cls.__name__}.apply at {caller()}: this autograd.Function does not say "
            "what it does to placements",
            where=f"{cls.__name__}.apply",
            name=cls.__name__,
            rule="its backward is not checked, so its types must be declared",
            advice="give it a staticmethod placement_rule(*types) that returns the type "
            "of the result (tensors' types for tensors, other arguments as they are), "
            "or call it in a region",
        )
    types = [tags.get(a) if isinstance(a, Tensor) else a for a in args]
    found = rule(*types)
    with suspended(), unseen():
        result: Any = original(cls, *args, **kwargs)
    results: tuple[Any, ...] = _as_tuple(result)
    types_of_results = _as_tuple(found)
    if len(types_of_results) != len(results):
        raise PlacementError(
            f"{cls.__name__}.placement_rule gave {len(types_of_results)} types for "
            f"{len(results)} results",
            where=f"{cls.__name__}.apply",
        )
    for tensor, said in zip(results, types_of_results, strict=True):
        if isinstance(tensor, Tensor):
            is_type = isinstance(said, TensorType)
            shape = tuple(tensor.shape)
            tags.put(tensor, said if is_type else declared(checked_mesh(), said, shape))
    return result


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return cast(Any, value) if isinstance(value, tuple) else (value,)


def _group_classes() -> list[Any]:
    """The process group, and backends written in Python."""
    found: list[Any] = [dist.ProcessGroup]
    for owner in found:
        found.extend(owner.__subclasses__())
    return found


def _watch_collectives() -> None:
    if not dist.is_available():
        return
    for owner in _group_classes():
        for name, method in list(owner.__dict__.items()):
            if callable(method) and _typed_call(name) is not None:
                _replace(owner, name, _refusing(method, name))


def _refusing(original: Any, name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current.mode is not None and not current.mode.lenient:
            raise raw_collective(name)
        return original.__get__(self, type(self))(*args, **kwargs)

    return method


def _typed_call(name: str) -> str | None:
    plain = name.replace("_", "")
    return next((call for start, call in TYPED_CALLS if plain.startswith(start)), None)


def raw_collective(name: str) -> PlacementError:
    """The error for a collective that goes round the types."""
    typed = _typed_call(name) or "all_reduce(x, axis, src=P, dst=R)"
    return PlacementError(
        f"{name} at {caller()}: a raw torch.distributed collective inside typecheck()",
        where=name,
        name=name,
        rule="it changes types and gradients without saying how",
        advice=f"placements.{typed}",
    )
