"""Flows of complex numbers and of Fourier transforms."""

from typing import Any

from placements.inference.flows.reductions import along
from placements.inference.flows.views import moved
from placements.inference.op import Op
from placements.inference.terms import Mixed, Operand
from placements.types.tensor import TensorType

PAIRS = "the last dim holds the real and the imaginary part of each number"


def of_pairs(op: Op, input: Operand) -> TensorType:
    """view_as_complex: (..., 2) -> (...)."""
    return moved(op, input, [*range(input.ndim - 1), Mixed(PAIRS)])


def to_pairs(op: Op, input: Operand) -> TensorType:
    """view_as_real: (...) -> (..., 2)."""
    return moved(op, input, list(range(input.ndim)))


def along_one(
    op: Op, input: Operand, n: Any = None, dim: Any = -1, norm: Any = None
) -> Any:
    """fft: along one dim, the last one if it is not named."""
    return along(op, input, dim).with_index(None)


def along_two(
    op: Op, input: Operand, s: Any = None, dim: Any = (-2, -1), norm: Any = None
) -> Any:
    """fft2: along two dims, the last ones if they are not named."""
    return along(op, input, dim).with_index(None)


def along_many(
    op: Op, input: Operand, s: Any = None, dim: Any = None, norm: Any = None
) -> Any:
    """fftn: along all dims, or as many of the last ones as there are sizes."""
    if dim is None and s is not None:
        dim = tuple(range(-len(s), 0))
    return along(op, input, dim).with_index(None)
