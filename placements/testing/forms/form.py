"""One call form: a line of Python, its operands, its mesh; and what became of it."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from placements.testing.forms.operands import FormOperand, varying

# What a line may name besides its operands.
WORDS: dict[str, Any] = {
    "torch": torch, "F": nn.functional, "nn": nn, "np": np, "math": math,
}  # fmt: skip


@dataclass
class Form:
    """One line, its operands, and the mesh on which it is tried."""

    op: str
    overload: str
    sizes: dict[str, int]
    line: str = ""
    operands: dict[str, FormOperand] = field(
        default_factory=lambda: dict[str, FormOperand]()
    )
    target: str = ""
    traits: set[str] = field(default_factory=lambda: set[str]())
    rank_axes: set[str] = field(default_factory=lambda: set[str]())
    settings: list[str] = field(default_factory=lambda: list[str]())  # sizes as numbers
    kept: set[str] = field(default_factory=lambda: set[str]())  # statistics it may write
    never: str = ""  # why no program with this line can be right, if so
    shared: tuple[str, ...] = ()  # axes on which all ranks are said to draw alike

    @property
    def is_plain(self) -> bool:
        """Whether no trait of the form is a reason to refuse it though it may be right.

        Sizes are one only where something is cut, or differs by rank.
        """
        every = [t for x in self.operands.values() for t in x.types.values()]
        cut = any(t.letter in "SV" for t in every)
        return not any(cut or "size" not in trait for trait in self.traits)

    @property
    def apart(self) -> list[str]:
        """The axes on which the line means something else at each place."""
        axes = {a for x in self.operands.values() for a in varying(x.types)}
        return [axis for axis in self.sizes if axis in axes | self.rank_axes]

    @property
    def sized_apart(self) -> list[str]:
        """The axes along which an operand has another shape at each place.

        So has what an op makes inside of a Varying operand and of uneven pieces.
        """
        operands = self.operands.values()
        axes = {
            axis
            for x in operands
            if len({value.shape for value in x.values.values()}) > 1
            for axis in varying(x.types)
        }
        own = {axis for x in operands for axis in varying(x.types)}
        uneven = {axis for x in operands for axis in x.uneven}
        return [axis for axis in self.sizes if axis in axes | (own & uneven)]


def run_line(form: Form) -> object:
    """Return the value of a line on one device, at the first place of each axis."""
    held = {
        name: next(iter(x.values.values())).clone() for name, x in form.operands.items()
    }
    first = dict.fromkeys(form.sizes, 0)
    mesh = SimpleNamespace(coordinate=first)
    names = {**WORDS, **held, "axis_rank": first.get, "current_mesh": lambda: mesh}
    return eval(form.line, names)


@dataclass(frozen=True)
class Judgement:
    """What became of a form.

    "invalid": the line does not run on one device. "accepted" and "refused" are right.
    "false": accepted with a type, value or gradient that is not true. "disagree": ranks
    accept and refuse, or infer different types. "crash": an exception from inside the
    checker. "torch": torch's own error on a rank, though the line runs on one device.
    "nameless": refused for an argument that the message does not name. `claims`: the
    types of what is accepted say something on every axis; Varying does not.
    """

    kind: str
    detail: str = ""
    claims: bool = False

    @property
    def fails(self) -> bool:
        return self.kind in ("false", "disagree", "crash", "torch", "nameless")
