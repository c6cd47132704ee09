"""Operands that are broadcast together: which of their dims meet."""

from builtins import max  # noqa: UP029 - Python's own, which a block replaces
from collections.abc import Sequence
from typing import Any, cast

from placements.inference.terms import FLOATING, SHAPES, Label, Operand, Refusal, Term
from placements.types.index import COMPUTED, Computed


def broadcast(operands: Sequence[Operand]) -> list[tuple[Label, ...]]:
    """Labels of operands that are broadcast together, dims aligned from the right.

    A dim of one row is broadcast only if that is all of it.
    """
    ndim = max(len(operand.shape) for operand in operands)
    labels: list[tuple[Label, ...]] = []
    for operand in operands:
        shift = ndim - len(operand.shape)
        own: list[Label] = list(range(shift, ndim))
        for dim, size in enumerate(operand.shape):
            if size == 1 and operand.is_one_row(dim):
                own[dim] = None
        labels.append(tuple(own))
    _check_sizes(operands, labels)
    return labels


def _check_sizes(operands: Sequence[Operand], labels: Sequence[tuple[Label, ...]]) -> None:
    # Where a dim is cut the rules know better why the sizes differ.
    cut: set[Label] = set()
    sizes: dict[Label, int] = {}
    clash: list[Label] = []
    for operand, own in zip(operands, labels, strict=True):
        for dim, (label, size) in enumerate(zip(own, operand.shape, strict=True)):
            if dim in operand.type.cut_dims:
                cut.add(label)
            if label is not None and sizes.setdefault(label, size) != size:
                clash.append(label)
    if set(clash) - cut:
        raise Refusal("the shapes do not broadcast", kind=SHAPES)


def terms_of(operands: Sequence[Operand], controls: Sequence[Operand] = ()) -> list[Term]:
    """Terms of operands that are broadcast together; `controls` carry no values."""
    every = [*operands, *controls]
    return [
        Term(operand, labels, is_control=place >= len(operands))
        for place, (operand, labels) in enumerate(zip(every, broadcast(every), strict=True))
    ]


def arithmetic_index(operands: Sequence[Operand]) -> Computed | None:
    """Integers out of arithmetic count nothing until somebody says what."""
    floats = any(operand.dtype.startswith(FLOATING) for operand in operands)
    return None if floats else COMPUTED


def is_number(value: object) -> bool:
    """Whether it is a Python number: it counts where a tensor of one element would."""
    return isinstance(value, int | float | complex)


def adds(*values: object) -> bool:
    """Whether one of the values is a Python number other than zero."""
    return any(is_number(value) and value != 0 for value in values)


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """The dims that an argument names, counted from the front; None names all."""
    if dim is None:
        return tuple(range(ndim))
    given = cast(Sequence[int], dim if isinstance(dim, list | tuple) else (dim,))
    return tuple(d % ndim if ndim else 0 for d in given)
