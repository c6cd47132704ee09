"""Writes to memory that has a type: by opaque code, and through another name for it.

Types belong to tensors, and several tensors may be names for one memory. So opaque code
(a region, an autograd.Function, a custom op) does not write into its arguments, and an
in-place op writes nothing that another name for the memory is not: that name would keep
its old type.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from placements._torch import base_of, memory_of, unseen
from placements.checker.call import Call, tensors_in
from placements.runtime import tags
from placements.runtime.callsite import name_of
from placements.runtime.describe import described
from placements.runtime.errors import PlacementError, refused_call, type_or_error
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
    return _Seen(position, tensor, tags.get(tensor), tags.writes_of(tensor), values)


def _is_written(seen: _Seen) -> bool:
    if tags.writes_of(seen.tensor) != seen.version:
        return True
    if seen.values is None:
        return False
    # Bit by bit: the numbers of equal values are equal, also where they are not finite.
    now = project(seen.tensor).view(torch.int64)
    return not torch.equal(now, seen.values.view(torch.int64))


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
    for tensor in tensors_in(value):
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        tags.count_write(tensor)


def watched_set(original: Any) -> Any:
    """Return a `Tensor.set_` that refuses to give other memory to a tensor with a type."""

    def set_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if current.mode is not None and _is_declared(self):
            raise refused_call(
                "set_",
                f"{name_of(self) or 'the tensor'} is given other memory behind its type",
                name=name_of(self) or "x",
                rule="its type says what the old memory holds",
                operands=[described(self)],
                advice="copy_ the values, or use the other tensor",
            )
        if current.mode is not None:
            tags.clear(self)  # a factory's type is about the old memory
            for source in args:
                if isinstance(source, Tensor):
                    with unseen():
                        tags.note_name(source)
        return original(self, *args, **kwargs)

    return set_


def noted_parameter(new: Any) -> Any:
    """`nn.Parameter(x)`, another name for the memory of x, which has a type of its own."""
    original: Any = new.__func__ if isinstance(new, staticmethod) else new

    def __new__(cls: Any, data: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        if current.mode is not None and isinstance(data, Tensor) and _is_declared(data):
            with unseen():
                tags.note_name(data)
        return original(cls, data, *args, **kwargs)

    return staticmethod(__new__)


def noted_array(from_array: Any) -> Any:
    """`torch.from_numpy` and the like: an array that numpy must not write is lent."""

    def noted_array(array: Any, *args: Any, **kwargs: Any) -> Tensor:
        result = from_array(array, *args, **kwargs)
        if current.mode is not None:
            lend_memory_of(array, result)
        return result

    return noted_array


def lend_memory_of(array: Any, result: Tensor) -> None:
    """Note that a tensor is made of an array which numpy must not write.

    Inside a block this is the memory of a tensor with a type.
    """
    if isinstance(array, np.ndarray):
        given = cast(Any, array)
        with unseen():
            if not given.flags.writeable and result.data_ptr() == given.ctypes.data:
                tags.lend(result)


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


def check_write(call: str, target: Tensor, found: TensorType | None) -> None:
    """Refuse an in-place op that makes the type of another name for its memory false.

    `found` is the type of the target after the write; None: it stays without one. The
    names are the tensor that the target is a view or a cast of, and names that are noted
    with the memory, because their types stay what they are.
    """
    if tags.is_lent(target):
        raise _shared(
            call, target, "an array of numpy", "the array is the memory of a tensor with a "
            "type, which a write would change",
        )  # fmt: skip
    if target.is_inference():
        _check_write_unwatched(call, target)
    else:
        _check_below(call, target)
    for known in tags.types_of_names(target):
        axis = _unfit(known, found)
        if axis is not None:
            raise _shared(
                call, target, f"a tensor of the type {known!r}", "all names for one memory "
                "hold what is written, and the other name keeps its type", axis,
            )  # fmt: skip


def _check_below(call: str, target: Tensor) -> None:
    """Refuse a write through a view or a cast that is not what the tensor below is."""
    base = base_of(target)
    below, known = None if base is None else tags.get(base), tags.get(target)
    if base is None or below is None or known is None or below.mesh != known.mesh:
        return
    if below.fresh is not None or known.fresh is not None:
        return
    for axis, t in known.items():
        old = below[axis].letter
        if t.letter != old:
            other = name_of(base) or "another tensor"
            raise _shared(
                call, target,
                f"{other}, which is {WORDS[old]} on axis {axis!r}, not {WORDS[t.letter]}",
                "a view or a cast copies nothing: a write through it would change the "
                "value below, which keeps its type", axis, described(base, below),
            )  # fmt: skip


def _unfit(known: TensorType, found: TensorType | None) -> str | None:
    """Return an axis on which memory of type `found` is not what a name of it is."""
    if found is None or known.mesh != found.mesh:
        return known.mesh.axes[0] if known.mesh.axes else None
    for axis, t in known.items():
        if t.letter not in ("V", found[axis].letter):
            return axis
    if known.index not in (None, found.index) or (known.pads and known.pads != found.pads):
        return known.mesh.axes[0]
    return None


def _shared(
    call: str, target: Tensor, other: str, rule: str, axis: str | None = None, *below: str
) -> PlacementError:
    """Return the error for a write to memory that has another name."""
    name = name_of(target, call) or "the tensor"
    return refused_call(
        call,
        f"{name} is another name for the memory of {other}",
        name=name,
        axis=axis,
        expected="memory of its own",
        actual=f"the memory of {other.partition(',')[0]}",
        rule=rule,
        operands=[described(target, tags.get(target), name_of(target, call)), *below],
        advice=f"{name} = {name}.clone()",
    )


def _check_write_unwatched(call: str, target: Tensor) -> None:
    """Refuse a write under inference_mode that may reach memory of another type.

    Torch does not say there what a tensor is a view of. A piece, or rows that each rank
    chose, may lie in the memory of a tensor that is equal on all ranks.
    """
    known, memory = tags.get(target), memory_of(target)
    if known is not None and known.fresh is None and memory is not None:
        is_part = target.numel() * target.element_size() != memory.nbytes()
        differs = any(t.letter in "SV" for t in known.types)
        if tags.is_cast(target) or (is_part and differs):
            name = name_of(target, call) or "the tensor"
            raise refused_call(
                call,
                f"{name} may be another name for the memory of a tensor of another type, "
                "and torch does not say so under inference_mode",
                name=name,
                expected="memory of its own",
                actual="a view or a cast",
                rule="a write through a view does not tell the tensor below it",
                operands=[described(target, known, name_of(target, call))],
                advice="write to the whole tensor (x[rows] = values), or use "
                "torch.no_grad() instead of inference_mode",
            )


def into(
    mode: Any, call: Call, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """`op(..., out=x)` is `x.copy_(op(...))`, if x fits and nobody wants a gradient."""
    if call.takes_mesh or "reduction" in call.roles:
        raise refused_call(
            call.op.name, "out= of a factory or of a loss is not known",
            rule="a factory would change a tensor behind its type, and torch computes "
            "some losses otherwise with out=",
            advice="use the result",
        )  # fmt: skip
    out, rest = kwargs["out"], {k: v for k, v in kwargs.items() if k != "out"}
    try:
        result = mode.__torch_function__(func, (), args, rest)
    except RuntimeError as error:
        raise refused_call(
            call.op.name, f"it cannot be computed without out=: {error}"
        ) from error
    fits = isinstance(out, Tensor) and isinstance(result, Tensor)
    if fits and out.shape != result.shape:
        sizes = f"out= is {tuple(out.shape)}, the result is {tuple(result.shape)}"
        raise refused_call(
            call.op.name, f"torch does not take these pieces: {sizes}",
            rule="torch would give out= other memory behind its type",
            advice="use the result",
        )  # fmt: skip
    fits = fits and out.dtype == result.dtype
    # One row may be a piece or the whole.
    fits = fits and type_or_error(out, "out=").is_cut_as(type_or_error(result, "out="))
    if not fits or result.requires_grad or out.requires_grad:
        raise refused_call(
            call.op.name,
            "out= is not cut as the result, of another dtype, or wants a gradient",
            rule="torch would give it other memory, or cut the graph, behind its type",
            advice="use the result",
        )
    return mode.__torch_function__(Tensor.copy_, (), (out, result))
