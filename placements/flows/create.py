"""Flows of factories: tensors that come from no other tensor's values."""

from typing import TYPE_CHECKING, Any

from placements.index import Index
from placements.infer import Operand
from placements.mesh import Mesh
from placements.tensor_type import (
    EMPTY,
    FILLED,
    MADE,
    ZERO,
    TensorType,
    from_factory,
    make,
)
from placements.types import R

if TYPE_CHECKING:
    from placements.ops import Op


def filled(op: "Op", mesh: Mesh, *args: Any, **kwargs: Any) -> TensorType:
    """zeros, ones, full and their _like and new_ forms: one number, given a shape."""
    if "zeros" in op.name:
        return from_factory(mesh, ZERO)
    if "full" in op.name:
        value = kwargs.get("fill_value", args[-1] if args else None)
        is_zero = not isinstance(value, Operand) and value == 0
        return from_factory(mesh, ZERO if is_zero else FILLED)
    return from_factory(mesh, FILLED)


def uninitialised(op: "Op", mesh: Mesh, *args: Any, **kwargs: Any) -> TensorType:
    """empty: what the memory held, unrelated on every rank until it is overwritten."""
    return from_factory(mesh, EMPTY)


def counted(op: "Op", mesh: Mesh, *args: Any, **kwargs: Any) -> TensorType:
    """arange(n): the rows of a dim of n rows; other ranges count nothing."""
    numbers = [a for a in args if isinstance(a, int | float)]
    plain = (
        len(numbers) == 1
        and isinstance(numbers[0], int)
        and not ({"start", "end", "step"} & kwargs.keys())
    )
    index = Index(int(numbers[0])) if plain and op.name == "arange" else None
    return make(mesh, {axis: R for axis in mesh.axes}, index, MADE)
