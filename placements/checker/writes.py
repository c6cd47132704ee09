"""Writes to memory that has a type: by opaque code, and through another name for it.

Types belong to tensors, and several tensors may be names for one memory. So opaque code
(a region, an autograd.Function, a custom op) does not write into its arguments, and an
in-place op does not write through a cast: the other name would keep its old type.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from placements._torch import base_of, unseen, version_of
from placements.runtime import tags
from placements.runtime.callsite import name_of
from placements.runtime.describe import described
from placements.runtime.errors import PlacementError, refused_call
from placements.runtime.fingerprints import project
from placements.runtime.state import current, observer, opaque
from placements.types.axis import WORDS
from placements.types.tensor import TensorType


class _Seen(NamedTuple):
    position: int
    tensor: Tensor
    known: TensorType | None
    version: int
    values: Tensor | None


@contextmanager
def reading_only(call: str, args: Iterable[Any]) -> Generator[list[Tensor]]:
    """Raise PlacementError if the block writes to one of the tensors in `args`.

    Writes that torch counts are always seen. With verify() the values are compared too,
    so that writes of a kernel are seen. A tensor that the block puts into the list (a
    result that is also an argument, which a Function marks dirty) may be written if it
    keeps its type.
    """
    with unseen():
        before = [_seen(k, arg) for k, arg in enumerate(args) if isinstance(arg, Tensor)]
    results: list[Tensor] = []
    with opaque():
        yield results
    with unseen():
        for seen in before:
            if not _is_written(seen):
                continue
            is_result = any(seen.tensor is result for result in results)
            if not is_result or tags.get(seen.tensor) != seen.known:
                raise _written_argument(call, seen)


def _seen(position: int, tensor: Tensor) -> _Seen:
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
    values = project(tensor) if plain and observer() is not None else None
    return _Seen(position, tensor, tags.get(tensor), version_of(tensor), values)


def _is_written(seen: _Seen) -> bool:
    if version_of(seen.tensor) != seen.version:
        return True
    if seen.values is None:
        return False
    now = project(seen.tensor)
    return not torch.allclose(now, seen.values, rtol=0.0, atol=0.0, equal_nan=True)


def _written_argument(call: str, seen: _Seen) -> PlacementError:
    name = name_of(seen.tensor) or f"argument {seen.position}"
    return refused_call(
        call,
        f"it writes into {name}, which it was given",
        name=name,
        expected="an argument that is only read",
        actual="written in place",
        rule="other names for the same memory would hold what their type does not say",
        operands=[described(seen.tensor, seen.known)],
        advice=f"pass {name}.clone(), and use the result",
    )


def count_write(value: Any) -> None:
    """Count a write to tensors that a kernel wrote without torch counting it."""
    if isinstance(value, Tensor):
        if not value.is_inference():
            torch.autograd.graph.increment_version(value)
    elif isinstance(value, list | tuple):
        for item in cast(Any, value):
            count_write(item)


def watched_set(original: Any) -> Any:
    """A `Tensor.set_` that refuses to give other memory to a tensor with a type."""

    def set_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if current.mode is not None and _is_declared(self):
            raise refused_call(
                "set_",
                f"{name_of(self) or 'the tensor'} is given another memory behind its type",
                name=name_of(self) or "x",
                rule="its type says what the old memory holds",
                operands=[described(self)],
                advice="copy_ the values, or use the other tensor",
            )
        if current.mode is not None:
            tags.clear(self)  # a factory's type is about the old memory
        return original(self, *args, **kwargs)

    return set_


def _is_declared(tensor: Tensor) -> bool:
    known = tags.get(tensor)
    return known is not None and known.fresh is None


def check_data(target: Tensor, value: Tensor) -> None:
    """Refuse `target.data = value` where the value has another type."""
    old, new = tags.get(target), tags.get(value)
    if old is None or new is None or old.fresh is not None or new.fresh is not None:
        return
    if old == new:
        return
    name = name_of(target) or "x"
    raise refused_call(
        f"{name}.data",
        f"{name} is {old!r}, and would become {new!r}",
        name=name,
        axis=next((axis for axis in old if axis in new and old[axis] != new[axis]), None),
        expected=repr(old),
        actual=repr(new),
        rule="whoever else holds the tensor would not know",
        operands=[described(target, old), described(value, new)],
        advice=f"use the new value, or give {name} one of its type: {name}.copy_(...)",
    )


def check_write(call: str, target: Tensor) -> None:
    """Refuse an in-place op through a cast: the value below has another type.

    Ordinary views keep what a tensor is on each axis, or make pieces Varying; fresh
    memory has its own check.
    """
    base = base_of(target)
    below, known = None if base is None else tags.get(base), tags.get(target)
    if base is None or below is None or known is None or below.mesh != known.mesh:
        return
    if below.fresh is not None or known.fresh is not None:
        return
    for axis, t in known.items():
        old = below[axis].letter
        if t.letter != old and (old, t.letter) != ("S", "V"):
            name, other = name_of(target) or "the tensor", name_of(base) or "another tensor"
            raise refused_call(
                call,
                f"{name} is another name for the memory of {other}, which is "
                f"{WORDS[old]} on axis {axis!r}, not {WORDS[t.letter]}",
                name=name,
                axis=axis,
                expected="memory of its own",
                actual=f"the memory of {other}",
                rule="a cast copies nothing: a write through it would change the value "
                "below, which keeps its type",
                operands=[described(target, known), described(base, below)],
                advice=f"{name} = {name}.clone()",
            )
