"""Tight: a refusal that says "unsound" has values for which no result type is right.

Each unsound row of the rule table is shown on the simplest op of its linearity: operands
are drawn on two ranks, every rank computes, and none of R, P and S(d) makes of the ranks'
results the result of the global values. If no such values were found, the rule would
refuse too much.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from placements.rules import LINEAR, MULTILINEAR, NONLINEAR, Linearity
from placements.testing.cases import Call
from placements.testing.strategies import numbers, seeded

SIZE = 4
RANKS = 2


@dataclass(frozen=True)
class Cell:
    """Letters of value operands and of controls, on one axis."""

    linearity: Linearity
    values: str
    controls: str = ""


def _sum(values: Sequence[Tensor], controls: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    for control in controls:
        total = torch.where(control > 0, total, 0)
    return total


def _product(values: Sequence[Tensor], controls: Sequence[Tensor]) -> Tensor:
    result = values[0]
    for value in values[1:]:
        result = result * value
    for control in controls:
        result = torch.where(control > 0, result, 0)
    return result


def _nonlinear(values: Sequence[Tensor], controls: Sequence[Tensor]) -> Tensor:
    return _sum(values, controls).exp()


OPS_OF: dict[Linearity, Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]] = {
    LINEAR: _sum,
    MULTILINEAR: _product,
    NONLINEAR: _nonlinear,
}


def is_refuted(cell: Cell, *, tries: int = 20) -> bool:
    """Whether every result type is wrong for some drawn values of these operands."""
    possible = {"R", "P", "S"}
    for seed in range(tries):
        possible &= _right_types(cell, seed)
        if not possible:
            return True
    return False


def _right_types(cell: Cell, seed: int) -> set[str]:
    generator = seeded(seed, cell.values, cell.controls)
    # What is not cut must be broadcast along what is.
    cut = bool(set(cell.values + cell.controls) & set("SV"))
    drawn = [_operand(letter, generator, cut) for letter in cell.values]
    chosen = [_operand(letter, generator, cut) for letter in cell.controls]
    op = OPS_OF[cell.linearity]
    wanted = op([whole for whole, _ in drawn], [whole for whole, _ in chosen])
    try:
        held = [
            op([h[r] for _, h in drawn], [h[r] for _, h in chosen]) for r in range(RANKS)
        ]
    except RuntimeError:  # a piece does not go with a whole: no type at all
        return set()
    joined = {"P": held[0] + held[1], "S": torch.cat(held)}
    if torch.equal(held[0], held[1]):
        joined["R"] = held[0]
    return {
        letter
        for letter, value in joined.items()
        if value.shape == wanted.shape and torch.allclose(value, wanted)
    }


def _operand(
    letter: str, generator: torch.Generator, cut: bool
) -> tuple[Tensor, list[Tensor]]:
    """A global value and what two ranks hold of it; Varying ones are pieces, forgotten."""
    if letter in "SV":
        pieces = numbers((SIZE,), generator)
        return pieces, list(pieces.chunk(RANKS))
    whole = numbers((1 if cut else SIZE,), generator)
    if letter == "P":
        part = numbers(whole.shape, generator)
        return whole, [whole - part, part]
    return whole, [whole, whole]


def is_refuted_along(call: Call, dim: int, *, tries: int = 6) -> bool:
    """Whether no result type is right for this call, its operand cut along `dim`."""
    shape = call.operands[0].shape
    possible: set[str] | None = None
    for seed in range(tries):
        whole = numbers(shape, seeded(seed, call.text)) / 2
        pieces = whole.tensor_split(RANKS, dim)
        try:
            wanted = _first(call.run(whole))
            held = [_first(call.run(piece)) for piece in pieces]
        except (RuntimeError, IndexError):
            return False
        right = {
            name
            for name, value in _joins(held)
            if value.shape == wanted.shape and torch.equal(value, wanted)
        }
        possible = right if possible is None else possible & right
    return not possible


def _first(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _joins(held: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The values that the ranks' results could stand for, by type."""
    if all(torch.equal(held[0], other) for other in held[1:]):
        yield "R", held[0]
    same = all(other.shape == held[0].shape for other in held[1:])
    if same and held[0].dtype != torch.bool:  # a sum of truth values is a count
        yield "P", torch.stack(list(held)).sum(0).to(held[0].dtype)
    for d in range(held[0].dim()):
        rest = {(*x.shape[:d], *x.shape[d + 1 :]) for x in held}
        if len(rest) == 1:
            yield f"S({d})", torch.cat(list(held), d)
