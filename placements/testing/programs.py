"""Straight-line programs: typed inputs, then one value for each statement.

A program is text: `x2 = x0 @ x1`, `x3 = all_reduce(x2, 'tp', src=P, dst=R)`. The same text
runs on ranks, on one device and under each engine; only the names in its scope differ.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as functional

from placements.runtime.declared import declared
from placements.types.axis import AxisType, Shard
from placements.types.extents import Padded
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

FLOAT, INTEGER = "float", "integer"

# Every torch name that statements use; the names of collectives are given by who runs them.
TORCH_NAMES: Mapping[str, Any] = {
    "relu": torch.relu, "exp": torch.exp, "maximum": torch.maximum, "where": torch.where,
    "matmul": torch.matmul, "linear": functional.linear, "addmm": torch.addmm,
    "bmm": torch.bmm, "einsum": torch.einsum, "softmax": torch.softmax,
    "layer_norm": functional.layer_norm,
    "cat": torch.cat, "stack": torch.stack, "embedding": functional.embedding,
}  # fmt: skip


@dataclass(frozen=True)
class Input:
    """A tensor that the program starts with: its global shape and its type."""

    shape: tuple[int, ...]
    types: tuple[tuple[str, AxisType], ...]  # in the order of the cuts
    kind: str = FLOAT

    def type_on(self, mesh: Mesh) -> TensorType:
        """Return the type on the rank that the mesh is seen from."""
        return declared(mesh, dict(self.types), self.local_shape(mesh))

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of what that rank holds; without an extent, as torch.chunk."""
        shape = list(self.shape)
        for axis, t in self.types:
            if isinstance(t, Shard):
                extent = (t.extent or Padded(shape[t.dim])).over(mesh.sizes[axis])
                shape[t.dim] = extent.local_size(mesh.place[axis])
        return tuple(shape)


@dataclass(frozen=True)
class Statement:
    """One line of a program, over the values x0, x1, ... so far."""

    text: str
    template: str = ""  # the template that it was made from: names the op in tables
    move: tuple[str, str, AxisType, AxisType] | None = None  # call, axis, src, dst

    @property
    def args(self) -> tuple[int, ...]:
        """The numbers of the values that it reads."""
        return tuple(int(k) for k in re.findall(r"\bx(\d+)\b", self.text))


@dataclass(frozen=True)
class Program:
    """Inputs x0, x1, ..., then one value for every statement; `seed` draws the inputs."""

    mesh: Mesh
    inputs: tuple[Input, ...]
    statements: tuple[Statement, ...]
    seed: int = 0

    @property
    def communicates(self) -> bool:
        """Whether some statement may communicate, forward or backward."""
        return any(one.move is not None for one in self.statements)

    def values(self, inputs: Sequence[Any], names: Mapping[str, Any]) -> list[Any]:
        """Return all values, inputs first; `names` are those of the collectives."""
        values = list(inputs)
        for statement in self.statements:
            values.append(evaluate(statement.text, values, names))
        return values

    def __str__(self) -> str:
        said = [
            f"x{k}: {'i64' if x.kind == INTEGER else 'f64'}{list(x.shape)}"
            f"{{{', '.join(f'{axis}:{t!r}' for axis, t in x.types)}}}"
            for k, x in enumerate(self.inputs)
        ]
        first = len(self.inputs)
        done = [f"x{first + k} = {one.text}" for k, one in enumerate(self.statements)]
        return "; ".join([*said, *done])

    __repr__ = __str__


@dataclass(frozen=True)
class Template:
    """A kind of statement: {a}, {b}, {c} are operands, {d} is a dim of the first."""

    template: str
    kinds: tuple[str, ...] = (FLOAT,)
    ndims: tuple[int, ...] = (2, 2, 2)  # of operands that fit together

    @property
    def has_dim(self) -> bool:
        return "{d}" in self.template

    def statement(self, args: Sequence[int], dim: int = 0) -> Statement:
        names = {letter: f"x{k}" for letter, k in zip("abc", args, strict=False)}
        return Statement(self.template.format(**names, d=dim), self.template)


@lru_cache(maxsize=4096)
def _compiled(text: str) -> CodeType:
    return compile(text, "<program>", "eval")


def evaluate(text: str, values: Sequence[Any], names: Mapping[str, Any]) -> Any:
    """Return the value of a statement's text."""
    scope = {f"x{k}": value for k, value in enumerate(values)}
    return eval(_compiled(text), {**TORCH_NAMES, **names}, scope)
