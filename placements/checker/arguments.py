"""The arguments of a call: which slots an op of the table has for them, in all overloads of
one torch function; the tensors among them; the arguments as inference sees them; and the
error for pieces that torch does not take.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from placements._torch import NO_DEFAULT, SlotData, op_name, signatures
from placements.inference.numbers import numbers_in
from placements.inference.op import SETTINGS, UNREAD, Op
from placements.inference.signature import ANY, Signature, Slot
from placements.inference.terms import Operand
from placements.runtime import tags
from placements.runtime.describe import described
from placements.runtime.errors import refused_call


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments, slices included, in order of appearance."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, slice):
        bounds = cast(Any, value)
        yield from tensors_in((bounds.start, bounds.stop, bounds.step))
    elif isinstance(value, list | tuple):
        for item in cast(Any, value):
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(cast(Any, value).values()))


def seen_by_inference(arg: Any, operands: Iterator[Operand]) -> Any:
    """The argument as inference sees it: operands for tensors, numbers for numpy's."""
    if isinstance(arg, Tensor):
        return next(operands)
    if isinstance(arg, np.generic):
        return cast(Any, arg).item()
    if isinstance(arg, list | tuple):
        items = cast(Any, arg)
        seen = [seen_by_inference(item, operands) for item in items]
        return seen if items.__class__ is list else tuple(seen)
    if isinstance(arg, slice):
        bounds = cast(Any, arg)
        return slice(
            *(
                seen_by_inference(b, operands)
                for b in (bounds.start, bounds.stop, bounds.step)
            )
        )
    return arg


def operands_in(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, slice):
        bounds = cast(Any, value)
        yield from operands_in((bounds.start, bounds.stop, bounds.step))
    elif isinstance(value, list | tuple):
        for item in cast(Any, value):
            yield from operands_in(item)


def with_operands(value: Any, operands: Sequence[Operand]) -> Any:
    """The value with each operand replaced by the one in its position."""
    if isinstance(value, Operand):
        return operands[value.position]
    if isinstance(value, list | tuple):
        items = cast(Any, value)
        seen = [with_operands(item, operands) for item in items]
        return seen if items.__class__ is list else tuple(seen)
    if isinstance(value, slice):
        bounds = cast(Any, value)
        ends = (bounds.start, bounds.stop, bounds.step)
        return slice(*(with_operands(end, operands) for end in ends))
    return value


class Call:
    """A known op, its overloads, and whether this form of it writes its first argument."""

    __slots__ = (
        "choices", "in_place", "met", "op", "reads_floats", "roles", "signatures",
        "takes_mesh", "takes_shared",
    )  # fmt: skip

    def __init__(self, op: Op, in_place: bool, signatures: Sequence[Signature]) -> None:
        self.op = op
        self.in_place = in_place
        self.signatures = signatures
        names = {slot.name for signature in signatures for slot in signature.slots}
        self.roles = {name: _role(op, name) for name in sorted(names | SETTINGS)}
        chosen = ("choice", "subscript")
        self.choices = [name for name, role in self.roles.items() if role in chosen]
        self.met: set[tuple[int, ...]] = set()  # hashes of the types of its calls
        self.reads_floats = op.reads_floats
        self.takes_mesh = "mesh" in op.takes
        self.takes_shared = "shared" in op.takes


def call_of(func: Any, name: str, op: Op, in_place: bool) -> Call:
    """The op with the signatures of this function, in the table's names for slots."""
    is_method, overloads = signatures(func, name)
    names = list(op.slots)
    if "::" in name and "*" not in op.slots:  # a custom op has names of its own
        overloads = [
            [(names[k] if k < len(names) else s[0], *s[1:]) for k, s in enumerate(slots)]
            for slots in overloads
        ]
    if not overloads:
        overloads = [[(slot, ANY, None, False) for slot in names]]
    converts = op_name(func) is not None
    return Call(
        op, in_place, [signature_of(op, is_method, slots, converts) for slots in overloads]
    )


def _names(own_names: Sequence[str], other_names: Mapping[str, str]) -> list[str]:
    """The table's names for the slots of a signature."""
    names = ["input" if name == "self" else name for name in own_names]
    if "input" not in names and "tensor" in names:
        names[names.index("tensor")] = "input"
    return [other_names.get(name, name) for name in names]


def _role(op: Op, slot: str) -> str | None:
    """What the slot is; None: the table does not say."""
    if slot in SETTINGS:
        return "flag"
    return "unread" if slot in UNREAD else op.slots.get(slot, op.slots.get("*"))


def signature_of(
    op: Op, is_method: bool, slots: Sequence[SlotData], converts: bool
) -> Signature:
    names = _names([slot[0] for slot in slots], op.other_names)
    return Signature(
        tuple(
            Slot(name, own_name, kind, default, default is NO_DEFAULT, by_name)
            for name, (own_name, kind, default, by_name) in zip(names, slots, strict=True)
        ),
        is_method,
        converts,
    )


def refuse_pieces(error: Exception, where: str, arguments: Any) -> None:
    """Raise PlacementError where torch was given pieces that do not fit."""
    tensors = list(tensors_in(arguments))
    known = [tags.get(t) for t in tensors]
    cut = [k for k in known if k is not None and any(t.letter in "SV" for t in k.types)]
    own_numbers = next(numbers_in(arguments), None) is not None
    of_torch = error.__class__ in (RuntimeError, IndexError, ValueError)
    if of_torch and (cut or own_numbers):
        raise refused_call(
            where,
            f"torch does not take these pieces: {error}",
            rule="the sizes of a piece are not those of the whole",
            operands=[described(t, k) for t, k in zip(tensors, known, strict=True)],
        ) from error
