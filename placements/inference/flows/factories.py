"""Flows of factories: tensors that come from no other tensor's values."""

from collections.abc import Iterable
from typing import Any

from placements.inference import padding
from placements.inference.op import Op
from placements.inference.terms import Operand, Refusal
from placements.types.axis import R, Shard
from placements.types.mesh import Mesh
from placements.types.tensor import (
    EMPTY,
    FILLED,
    MADE,
    ZERO,
    TensorType,
    from_factory,
    make,
)


def filled(op: Op, mesh: Mesh, *args: Any, **kwargs: Any) -> TensorType:
    """zeros, ones, full and their _like and new_ forms: one number, given a shape."""
    like = args[0] if op.name.endswith("_like") else None
    of_a_tensor = like is not None or op.name.startswith("new_")
    _refuse_tensors([*(args[1:] if of_a_tensor else args), *kwargs.values()])
    fill = ZERO if "zeros" in op.name else FILLED
    if "full" in op.name and kwargs.get("fill_value", args[-1]) == 0:
        fill = ZERO
    if like is None:
        return from_factory(mesh, fill)
    # In the shape of a piece it is a piece, whatever the rest.
    types = {a: t if isinstance(t, Shard) else R for a, t in like.type.items()}
    made = make(like.type.mesh, types, fresh=fill)
    return made.with_pads(padding.in_shape_of(like, 0 if fill == ZERO else None))


def _refuse_tensors(values: Iterable[Any]) -> None:
    """A factory's numbers are the same on all ranks only if they are Python numbers."""
    for value in values:
        if isinstance(value, Operand):
            raise Refusal(
                "a factory that takes its number from a tensor makes what that tensor is; "
                "expand the tensor instead",
                operand=value,
                expected="a Python number",
            )


def uninitialised(op: Op, mesh: Mesh, *args: Any, **kwargs: Any) -> TensorType:
    """empty: what the memory held, unrelated on every rank until it is overwritten."""
    return from_factory(mesh, EMPTY)


def counted(op: Op, mesh: Mesh, *args: Any, **kwargs: Any) -> TensorType:
    """arange, linspace, eye: numbers that are the same on all ranks.

    Nothing says which rows an arange counts: those of a dim of as many rows, or the first
    rows of a longer one.
    """
    _refuse_tensors([*args, *kwargs.values()])
    return make(mesh, {axis: R for axis in mesh.axes}, fresh=MADE)
