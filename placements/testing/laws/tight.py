"""Tight: a cell of the rule table gives a type that is right, or no type is.

A cell is the letters of an op's operands on one axis. It is shown on the simplest op of its
linearity: operands are drawn on two ranks, every rank computes, and a result type is right
if the ranks' results join to the result of the global values, and the gradients, started
with parts of one global cotangent as the type's dual says, to the global gradients. Values
are drawn until every type was wrong once; a refused cell for which some type never is would
be refused without need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placements.inference.rules import LINEAR, MULTILINEAR, NONLINEAR, Linearity
from placements.testing.draw.whole_numbers import nonzero_numbers, seeded

SIZE = 4
RANKS = 2

# What a result may be. Varying says nothing, so it is never wrong; what must not be
# forgotten is another law (`precise`).
RESULT_LETTERS = "RIPS"


@dataclass(frozen=True)
class Cell:
    """Letters of value operands and of controls, on one axis."""

    linearity: Linearity
    values: str
    controls: str = ""

    @property
    def letters(self) -> str:
        return self.values + self.controls


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def _product(values: Sequence[Tensor]) -> Tensor:
    result = values[0]
    for value in values[1:]:
        result = result * value
    return result


OPS_OF: dict[Linearity, Callable[[Sequence[Tensor]], Tensor]] = {
    LINEAR: _sum,
    MULTILINEAR: _product,
    NONLINEAR: lambda values: _sum(values).exp(),
}


def _run(cell: Cell, operands: Sequence[Tensor]) -> Tensor:
    """Run the op of a cell; a control divides, so that it has a gradient."""
    result = OPS_OF[cell.linearity](operands[: len(cell.values)])
    for control in operands[len(cell.values) :]:
        result = result / control
    return result


def is_refuted(cell: Cell, *, tries: int = 20) -> bool:
    """Return whether every result type is wrong for some drawn values of these operands."""
    possible = set(RESULT_LETTERS)
    for seed in range(tries):
        possible &= right_types(cell, seed)
        if not possible:
            return True
    return False


def right_types(cell: Cell, seed: int) -> set[str]:
    """Return the letters that are right for the values of this seed."""
    generator = seeded(seed, cell.values, cell.controls)
    # What is not cut must be broadcast along what is.
    cut = bool(set(cell.letters) & set("SV"))
    drawn = [_operand(letter, generator, cut) for letter in cell.letters]
    wholes = [whole.requires_grad_() for whole, _ in drawn]
    held = [[parts[r].requires_grad_() for _, parts in drawn] for r in range(RANKS)]
    wanted = _run(cell, wholes)
    results = [_run(cell, one) for one in held]
    cotangent = nonzero_numbers(wanted.shape, generator)
    expected = torch.autograd.grad(wanted, wholes, cotangent)
    right: set[str] = set()
    for letter in RESULT_LETTERS:
        joined = _joined([r.detach() for r in results], letter)
        if joined is None or not _equal(joined, wanted.detach()):
            continue
        # Of an output that is R the gradient is P, and so on: the parts of its dual.
        seeds = _parts(cotangent, _DUAL[letter], generator)
        grads = [
            torch.autograd.grad(y, xs, s, retain_graph=True)
            for y, xs, s in zip(results, held, seeds, strict=True)
        ]
        if all(
            _fits([g[k] for g in grads], _DUAL[x], expected[k])
            for k, x in enumerate(cell.letters)
        ):
            right.add(letter)
    return right


# Written out, since a law must not read what it judges.
_DUAL = {"R": "P", "P": "R", "I": "I", "S": "S", "V": "S"}


def _fits(held: Sequence[Tensor], letter: str, wanted: Tensor) -> bool:
    joined = _joined(held, letter)
    return joined is not None and _equal(joined, wanted)


def _equal(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found, wanted)


def _joined(held: Sequence[Tensor], letter: str) -> Tensor | None:
    """Return the value that two ranks hold as that type; None if it is not so."""
    if letter == "P":
        return held[0] + held[1] if held[0].shape == held[1].shape else None
    if letter in "SV":
        return torch.cat(list(held))
    return held[0] if _equal(held[0], held[1]) else None


def _parts(value: Tensor, letter: str, generator: torch.Generator) -> list[Tensor]:
    if letter == "P":
        part = nonzero_numbers(value.shape, generator)
        return [value - part, part]
    if letter in "SV":
        return list(value.chunk(RANKS))
    return [value.clone(), value.clone()]


def _operand(
    letter: str, generator: torch.Generator, cut: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return a value, and what two ranks hold; Varying ones are forgotten pieces."""
    if letter in "SV":
        pieces = nonzero_numbers((SIZE,), generator)
        return pieces, [piece.clone() for piece in pieces.chunk(RANKS)]
    shape = (1 if cut else SIZE,)
    if letter == "P":  # no part is zero, nor their sum: it may be a divisor
        held = [nonzero_numbers(shape, generator), nonzero_numbers(shape, generator) / 2]
        held[1] = torch.where(held[0] + held[1] == 0, -held[1], held[1])
        return held[0] + held[1], held
    whole = nonzero_numbers(shape, generator)
    return whole, [whole.clone(), whole.clone()]
