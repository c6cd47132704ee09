"""Bind a call to its op's signature: which argument is in which slot.

Torch takes one argument in many ways: by position, by name, by another name, as a method's
receiver, as several numbers instead of a list. Here they become one thing, a mapping from
slots to values, before anything else looks at them. Torch's schemas come in as data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from placements.inference.numbers import RankInt
from placements.inference.terms import Operand

# The kinds of slots are those of torch's schemas. ANY: torch does not say.
ANY, REST = "any", "rest"


@dataclass(frozen=True)
class Slot:
    """One argument of a signature: the table's name for it, and torch's own."""

    name: str
    own_name: str
    kind: str
    default: Any
    is_required: bool
    by_name_only: bool


@dataclass(frozen=True)
class Signature:
    """One overload of an op; `is_method`: the receiver comes first, wherever `self` is."""

    slots: tuple[Slot, ...]
    is_method: bool = False
    converts: bool = False  # whole numbers and bools stand for each other: torch.ops


# Other names that torch takes for a slot, where the signature has no slot of that name.
_ALIASES = {
    "x": "input", "a": "input", "x1": "input", "x2": "other",
    "axis": "dim", "keepdims": "keepdim",
}  # fmt: skip

# What Python's parser takes beside the schema.
_PYTHON_ONLY = ("requires_grad",)

Bound = dict[str, Any]


def bind(
    signatures: Sequence[Signature], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Bound | None:
    """Return the slots of the first overload that the arguments fit; None if none fits."""
    for number_as_tensor in (False, True):
        for signature in signatures:
            bound = _fit(signature, list(args), kwargs, number_as_tensor)
            if bound is not None:
                return bound
    return None


def defaults(signatures: Sequence[Signature], name: str) -> list[Any]:
    """Return what the overloads take for a slot that is not given."""
    return [
        slot.default
        for signature in signatures
        for slot in signature.slots
        if slot.name == name and not slot.is_required
    ]


def _fit(
    signature: Signature, args: list[Any], kwargs: Mapping[str, Any], number_as_tensor: bool
) -> Bound | None:
    slots = list(signature.slots)
    given: Bound = {}
    if signature.is_method and args:
        receiver = next((slot for slot in slots if slot.own_name == "self"), None)
        if receiver is None:
            return None
        given[receiver.name] = args.pop(0)
        slots.remove(receiver)
    places = [slot for slot in slots if not slot.by_name_only]
    takes_rest = bool(places) and places[0].kind == REST
    takes_ints = len(places) == 1 and places[0].kind.startswith("int[]")
    if takes_rest or (takes_ints and _are_ints(args)):
        given[places[0].name], args = tuple(args), []
    if len(args) > len(places):
        return None
    given |= {slot.name: arg for slot, arg in zip(places, args, strict=False)}
    left = dict(kwargs)
    for slot in slots:
        names = [slot.name, slot.own_name]
        names += ["input"] if slot.own_name == "self" else []
        names += [alias for alias, name in _ALIASES.items() if name in names]
        named = next((name for name in names if name in left), None)
        if slot.name in given:
            continue
        if named is not None:
            given[slot.name] = left.pop(named)
        elif slot.is_required:
            return None
    extra = {name: left.pop(name) for name in _PYTHON_ONLY if name in left}
    if left:
        return None
    for slot in signature.slots:
        if slot.name not in given:
            continue
        value = given[slot.name]
        if signature.converts and _converts(slot.kind, value):
            # A number that belongs to an axis stays one, for its role to refuse it.
            if not isinstance(value, RankInt):
                to = bool if slot.kind.startswith("bool") else int
                given[slot.name] = to(value)
        elif not _fits(slot.kind, value, number_as_tensor):
            return None
    bound = {slot.name: given[slot.name] for slot in signature.slots if slot.name in given}
    return bound | extra


def _converts(kind: str, value: object) -> bool:
    if isinstance(value, bool):
        return kind.removesuffix("?") in ("int", "int[]")
    return isinstance(value, int) and kind.removesuffix("?") == "bool"


def _are_ints(args: Sequence[Any]) -> bool:
    """view(2, 3) for view((2, 3))."""
    return bool(args) and all(_is_int(arg) for arg in args)


def _is_int(value: object) -> bool:
    if isinstance(value, Operand):
        return value.ndim == 0 and not value.can_have_gradient and not value.is_bool
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, Operand):
        return value.ndim == 0
    return isinstance(value, int | float | complex)


def _fits(kind: str, value: Any, number_as_tensor: bool) -> bool:
    if kind in (ANY, REST):
        return True
    if value is None:
        return kind.endswith("?")
    match kind.removesuffix("?"):
        case "Tensor":
            if isinstance(value, Operand):
                return True
            return number_as_tensor and _is_number(value)
        case "Tensor[]":
            return isinstance(value, list | tuple)
        case "int":
            return _is_int(value)
        case "int[]":
            if not isinstance(value, list | tuple):
                return _is_int(value)
            return all(_is_int(item) for item in cast(Any, value))
        case "Scalar" | "float":
            return _is_number(value)
        case "bool":
            return isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "device":
            is_index = isinstance(value, int | str) and not isinstance(value, bool)
            return is_index or type(value).__name__ == "device"
        case "dtype":
            return value in (bool, int, float, complex) or type(value).__name__ == "dtype"
        case name:  # a layout, a memory format, a generator
            return type(value).__name__ == name
