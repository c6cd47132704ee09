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


def anew_along(
    op: Op, input: Operand, dim: Any = None, s: Any = None, **settings: Any
) -> TensorType:
    """fft, fftn, glu: other numbers along dims; along all, or as many as have a size."""
    if dim is None and s is not None:
        dim = tuple(range(-len(s), 0))
    return along(op, input, dim).with_index(None)
