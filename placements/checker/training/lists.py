"""Ops over lists of tensors, with which optimizers do one step for all parameters.

`torch._foreach_add_(xs, ys)` is `x.add_(y)` for each element of the lists, so each element
is judged by the row of the plain op. `torch._fused_adamw_(...)` is a step of an optimizer
for each parameter: what it reads and writes of one parameter must have one type.

All elements are judged before anything is written, so that a refused call changes nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch import Tensor

from placements._torch import NO_DEFAULT, SlotData, element_slots
from placements.checker.call import Call, tensors_in
from placements.inference.ops import OPS
from placements.runtime import tags
from placements.runtime.callsite import located
from placements.runtime.describe import described
from placements.runtime.errors import mismatch, refused_call, type_or_error
from placements.types.axis import WORDS
from placements.types.tensor import EMPTY, TensorType

Handler = Callable[[Any, Any, Any, Any], Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Slots of fused ops that hold numbers, one for all elements or one for each.
NUMBERS = ("state_steps", "lr", "grad_scale", "found_inf")
# Any op that is not linear in any of its values.
_LIKE = "hypot"


@dataclass(frozen=True)
class Element:
    """Stands in the mode for a list op at one element: gives the result, or what it writes.

    Two of one name are equal, so that the mode finds what to do with them by name.
    """

    name: str
    result: Any = field(default=None, compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if self.result is None else self.result


def list_op(name: str) -> tuple[Call, Handler] | None:
    """Return the plain op of a list op, with its overloads, and what handles a call.

    None if it is no list op, or has no plain op in the table.
    """
    plain, in_place = name.removeprefix("_foreach_").removesuffix("_"), name.endswith("_")
    if not name.startswith("_foreach_") or plain not in OPS:
        return None
    op = replace(OPS[plain], name=name.removesuffix("_"))
    overloads = element_slots(name, plain)
    return Call(op, in_place, overloads), _each_element(name, in_place)


def _each_element(name: str, in_place: bool) -> Handler:

    def handle(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        calls = _elements(name, args, kwargs)
        if in_place:
            with_targets = [(call[0][0], call) for call in calls]
            return _written(mode, name, with_targets, lambda: func(*args, **kwargs))
        results = func(*args, **kwargs)  # writes nothing, so it may be judged after
        for result, (given, named) in zip(results, calls, strict=True):
            mode.__torch_function__(Element(name, result), (), given, named)
        return results

    return handle


def _elements(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Arguments]:
    """Return the arguments of the plain op for each element of the lists."""
    every = (*args, *kwargs.values())
    sizes = {len(cast(Any, arg)) for arg in every if isinstance(arg, list | tuple)}
    if len(sizes) != 1 or not args or "out" in kwargs:
        raise refused_call(
            name,
            f"it is given lists of {sorted(sizes)} elements"
            + (", and out=" if "out" in kwargs else ""),
            rule="the lists are gone through together, element by element",
            advice="give the lists by position, all of one length, and use the result",
        )
    return [
        (
            tuple(_element(arg, k) for arg in args),
            {slot: _element(arg, k) for slot, arg in kwargs.items()},
        )
        for k in range(sizes.pop())
    ]


def _element(arg: Any, k: int) -> Any:
    return cast(Any, arg)[k] if isinstance(arg, list | tuple) else arg


def fused_step(name: str) -> tuple[Call, Handler] | None:
    """Return what judges one parameter of a fused optimizer, and what handles a call.

    Each element comes from all that is there of the parameter, and is not linear in it.
    """
    overloads = element_slots(name, name) if name.startswith("_fused_") else []
    if not overloads or [slot[0] for slot in overloads[0][:2]] != ["self", "grads"]:
        return None
    slots = [slot for slot, _, _, by_name in overloads[0] if not by_name]
    op = replace(OPS[_LIKE], name=name.removesuffix("_"))
    read = [(s, "Tensor", None, False) for s in slots[1:] if s not in NUMBERS]
    first: SlotData = (slots[0], "Tensor", NO_DEFAULT, False)
    return Call(op, True, [[first, *read]]), _one_step(name, slots)


def _one_step(name: str, slots: Sequence[str]) -> Handler:

    def handle(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        bound = dict(zip(slots, args, strict=False)) | kwargs
        for slot in NUMBERS:
            for number in tensors_in(bound.get(slot)):
                _check_equal(name, slot, number)
        lists = [bound[slot] for slot in slots if slot not in NUMBERS and bound.get(slot)]
        calls: list[tuple[Tensor, Arguments]] = []
        filled: list[tuple[Tensor, Tensor]] = []  # what the step fills, for which
        for given, _ in _elements(name, lists, {}):
            read = [t for t in given if not (bound.get("is_first_step") and _is_empty(t))]
            for target in given:
                if all(target is not other for other in read):
                    filled.append((target, given[0]))
                    continue
                others = [other for other in read if other is not target]
                calls.append((target, ((target, *others), {})))
        result = _written(mode, name, calls, lambda: func(*args, **kwargs))
        for buffer, parameter in filled:
            tags.put(buffer, type_or_error(parameter, name))
        return result

    return handle


def _is_empty(tensor: Tensor) -> bool:
    known = tags.get(tensor)
    return known is not None and known.fresh == EMPTY


def _check_equal(name: str, slot: str, number: Tensor) -> None:
    """Raise PlacementError unless a number is the same on all ranks."""
    known = type_or_error(number, name)
    for axis, t in known.items():
        if t.letter not in "RI":
            raise mismatch(
                located(name), slot, axis, "Replicate", WORDS[t.letter],
                rule="a number that steps all elements must be the same on all ranks",
                operands=[described(number, known)],
            )  # fmt: skip


def _written(
    mode: Any,
    name: str,
    calls: Sequence[tuple[Tensor, Arguments]],
    run: Callable[[], Any],
) -> Any:
    """Judge a write to every target, then run them all at once."""
    judged: list[tuple[Tensor, TensorType | None]] = []
    try:
        for target, (given, named) in calls:
            old = tags.get(target)
            mode.__torch_function__(Element(name), (), given, named)
            judged.append((target, old))
    except BaseException:
        for target, old in reversed(judged):  # nothing was written
            if old is not None:
                tags.put(target, old)
        raise
    try:
        result = run()
    except BaseException:
        for target, old in judged:  # nobody knows what was written
            if old is not None and old.fresh is not None:
                tags.clear(target)
        raise
    for target, _ in judged:
        known = tags.get(target)
        if known is not None:
            tags.put(target, known)  # as of now, after the write
    return result
