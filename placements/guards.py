"""Doors that a torch-function mode does not see, watched while checking is on.

`autograd.Function.apply` hides a backward that nobody checked, and a raw collective
moves data between ranks behind the types. Both are found by replacing the methods that
every such call goes through, for as long as any thread checks.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placements import tags
from placements.callsite import caller
from placements.errors import PlacementError
from placements.state import current, suspended

# Methods of a process group that send or receive -> the typed call that replaces them.
TYPED_CALLS: dict[str, str] = {
    "allreduce": "all_reduce(x, axis, src=P, dst=R)",
    "allreduce_coalesced": "all_reduce(x, axis, src=P, dst=R)",
    "reduce": "all_reduce(x, axis, src=P, dst=R)",
    "allgather": "all_gather(x, axis, src=S(0), dst=R)",
    "_allgather_base": "all_gather(x, axis, src=S(0), dst=R)",
    "allgather_coalesced": "all_gather(x, axis, src=S(0), dst=R)",
    "allgather_into_tensor_coalesced": "all_gather(x, axis, src=S(0), dst=R)",
    "gather": "all_gather(x, axis, src=S(0), dst=R)",
    "reduce_scatter": "reduce_scatter(x, axis, src=P, dst=S(0))",
    "_reduce_scatter_base": "reduce_scatter(x, axis, src=P, dst=S(0))",
    "reduce_scatter_tensor_coalesced": "reduce_scatter(x, axis, src=P, dst=S(0))",
    "alltoall": "all_to_all(x, axis, src=V, dst=V)",
    "alltoall_base": "all_to_all(x, axis, src=V, dst=V)",
    "broadcast": "all_reduce(convert(x, axis, src=R, dst=P), axis, src=P, dst=R)",
    "scatter": "convert(x, axis, src=R, dst=S(0))",
    "send": "all_to_all(x, axis, src=V, dst=V)",
    "recv": "all_to_all(x, axis, src=V, dst=V)",
    "recv_anysource": "all_to_all(x, axis, src=V, dst=V)",
}

_FUNCTIONAL = {
    "all_reduce": "allreduce",
    "all_gather_into_tensor": "_allgather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}

# Functions of torch whose backward is the backward of the checked ops inside them.
TRANSPARENT = frozenset({"CheckpointFunction"})

_lock = threading.Lock()
_watchers = 0
_undo: list[Callable[[], None]] = []


@contextmanager
def doors_watched() -> Iterator[None]:
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
        if current.mode is None or current.mode.lenient or cls.__name__ in TRANSPARENT:
            return original(cls, *args, **kwargs)
        return _checked_apply(original, cls, args, kwargs)

    _replace(torch.autograd.Function, "apply", classmethod(apply))


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
    with suspended(), torch._C.DisableTorchFunction():
        result = original(cls, *args, **kwargs)
    results = result if isinstance(result, tuple) else (result,)
    declared = found if isinstance(found, tuple) else (found,)
    for tensor, tensor_type in zip(results, declared, strict=True):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if isinstance(tensor, Tensor) and tensor_type is not None:
            tags.put(tensor, tensor_type)  # pyright: ignore[reportUnknownArgumentType]
    return result  # pyright: ignore[reportUnknownVariableType]


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
        for name in TYPED_CALLS:
            if name in owner.__dict__:
                _replace(owner, name, _refusing(owner.__dict__[name], name))


def _refusing(original: Any, name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current.mode is not None:
            raise raw_collective(name)
        return original.__get__(self, type(self))(*args, **kwargs)

    return method


def raw_collective(name: str) -> PlacementError:
    """The error for a collective that goes round the types."""
    typed = TYPED_CALLS.get(_FUNCTIONAL.get(name, name), "a call of placements.collectives")
    return PlacementError(
        f"{name} at {caller()}: a raw torch.distributed collective inside typecheck()",
        where=name,
        name=name,
        rule="it changes types and gradients without saying how",
        advice=f"placements.{typed}",
    )
