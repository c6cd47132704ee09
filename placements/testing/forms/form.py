"""One call form: a line of Python, its operands, and the mesh on which it is tried."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from placements.testing.forms.operands import Operand, varying

# What a line may name besides its operands.
WORDS: dict[str, Any] = {
    "torch": torch, "F": nn.functional, "nn": nn, "np": np, "math": math,
}  # fmt: skip

# What design.md refuses on purpose although it may be right: traits of forms that do not
# count towards the floor of accepted forms.
ON_PURPOSE: dict[str, str] = {
    "tensor as integer": "a tensor in a slot that takes an integer is refused where the "
    "row of the op gives the slot no role",
    "size by position": "a size read from a piece where values depend on position (arange, "
    "slices, narrow, repeat): rank r does not hold the r-th piece of the result",
    "size as value": "a size read from a piece is Partial where it is a value, and many "
    "ops take no Partial",
    "plain size": "a constant whose sizes are plain numbers is Replicate, and a view to "
    "plain sizes that could be read in several ways is refused",
    "rank": "a number of an axis in a slot whose role the row does not give",
    "tensor as number": "a tensor in a slot that takes a number is refused where the row "
    "of the op gives the slot no role",
}


@dataclass
class Form:
    """One line, its operands, and the mesh on which it is tried."""

    op: str
    overload: str
    sizes: dict[str, int]
    line: str = ""
    operands: dict[str, Operand] = field(default_factory=lambda: dict[str, Operand]())
    target: str = ""
    traits: set[str] = field(default_factory=lambda: set[str]())
    rank_axes: set[str] = field(default_factory=lambda: set[str]())

    @property
    def refused_on_purpose(self) -> bool:
        """Whether `ON_PURPOSE` lists a trait of the form; sizes matter where one is cut."""
        every = [t for x in self.operands.values() for t in x.types.values()]
        cut = any(t.letter in "SV" for t in every)
        listed = self.traits & ON_PURPOSE.keys()
        return any(cut or "size" not in trait for trait in listed)

    @property
    def apart(self) -> list[str]:
        """The axes on which the line means something else at each place."""
        axes = {a for x in self.operands.values() for a in varying(x.types)}
        return [axis for axis in self.sizes if axis in axes | self.rank_axes]


def run_line(form: Form) -> object:
    """The value of a line on one device, at the first place of each axis."""
    held = {
        name: next(iter(x.values.values())).clone() for name, x in form.operands.items()
    }
    first = dict.fromkeys(form.sizes, 0)
    mesh = SimpleNamespace(coordinate=first)
    names = {**WORDS, **held, "axis_rank": first.get, "current_mesh": lambda: mesh}
    return eval(form.line, names)
