"""What a tensor is that is made of numbers that stand in the program."""

from typing import Any, cast

from placements.inference.numbers import facts_of
from placements.types.axis import BY_LETTER, AxisType, V
from placements.types.mesh import Mesh
from placements.types.tensor import FILLED, MADE, ZERO, TensorType, from_factory, make


def literal_type(mesh: Mesh, value: Any) -> TensorType | None:
    """Return the type of a tensor that is made of a number, or of nested lists of numbers.

    Numbers of the program are the same on all ranks, unless they belong to axes. A list
    without numbers holds nothing, which fits every type as zeros do. None if the list holds
    anything else: a bool cannot say that it differs by rank.
    """
    numbers = _numbers_of(value)
    if numbers is None:
        return None
    known = [facts_of(number) for number in numbers]
    if not any(facts.letters for facts in known):
        if isinstance(value, list | tuple):
            return from_factory(mesh, MADE if numbers else ZERO)
        return from_factory(mesh, FILLED if value else ZERO)
    types: dict[str, AxisType] = {}
    elsewhere = any(axis not in mesh.sizes for facts in known for axis, _ in facts.letters)
    for axis in mesh.axes:
        letters = {facts.letter(axis) for facts in known}
        is_one = len(letters) == 1 and not elsewhere
        types[axis] = BY_LETTER[letters.pop()] if is_one else V
    return make(mesh, types, fresh=MADE)


def _numbers_of(value: Any) -> list[Any] | None:
    if not isinstance(value, list | tuple):
        return [value] if isinstance(value, int | float | complex) else None
    numbers: list[Any] = []
    for item in cast(Any, value):
        inner = None if isinstance(item, bool) else _numbers_of(item)
        if inner is None:
            return None
        numbers += inner
    return numbers
