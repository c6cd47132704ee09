"""Walk through the arguments of a call: tensors, operands, and what stands for them."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from placements.inference.terms import Operand


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
