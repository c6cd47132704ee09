"""Parameters cut as their type says, with values that do not depend on the mesh.

Row r of a parameter's global leading dim is drawn from a generator of its own, seeded by
the seed, the parameter's name and r. So every rank draws what it holds and no more, equal
where ranks hold equal rows, and a layer on any mesh starts from the same global weights.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from placements import Mesh, Shard
from placements.torch_private import unseen
from placements.types import AxisType

Types = dict[str, AxisType]


@dataclass(frozen=True)
class Spec:
    """A parameter: its global shape, and how `types` cut it on `mesh`."""

    shape: tuple[int, ...]
    types: Types
    mesh: Mesh

    def rows(self, dim: int) -> range:
        """The global rows of `dim` that this rank holds; cuts are even."""
        start, size = 0, self.shape[dim]
        for axis, t in self.types.items():
            if isinstance(t, Shard) and t.dim == dim and axis in self.mesh.sizes:
                assert size % self.mesh.sizes[axis] == 0, (self, dim)
                size //= self.mesh.sizes[axis]
                start += self.mesh.coordinate[axis] * size
        return range(start, start + size)

    def empty(self) -> nn.Parameter:
        return nn.Parameter(
            torch.empty([len(self.rows(d)) for d in range(len(self.shape))])
        )


def draw_(parameter: Tensor, spec: Spec, name: str, seed: int) -> None:
    """Fill with this rank's part of normal numbers, of deviation 1/sqrt(fan-in)."""
    if parameter.is_meta:
        return
    scale = 1 / math.sqrt(spec.shape[-1])
    with torch.no_grad(), unseen():  # not yet declared, so there is nothing to check
        for here, row in enumerate(spec.rows(0)):
            whole = torch.randn(spec.shape[1:], generator=_generator(seed, name, row))
            parameter[here].copy_(_cut(whole, spec) * scale)


def _cut(row: Tensor, spec: Spec) -> Tensor:
    for dim in range(1, len(spec.shape)):
        held = spec.rows(dim)
        row = row.narrow(dim - 1, held.start, len(held))
    return row


def _generator(*key: object) -> torch.Generator:
    digest = hashlib.blake2b(repr(key).encode(), digest_size=7).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big"))


def declare_specs(module: nn.Module, specs: dict[str, Spec], seed: int) -> None:
    """Register a parameter for every spec and fill it."""
    for name, spec in specs.items():
        module.register_parameter(name, spec.empty())
    redraw(module, specs, seed)


def redraw(module: nn.Module, specs: dict[str, Spec], seed: int) -> None:
    for name, spec in specs.items():
        draw_(module.get_parameter(name), spec, f"{type(module).__name__}.{name}", seed)
