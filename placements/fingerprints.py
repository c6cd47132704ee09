"""Two numbers that tell tensors apart: a seeded random projection, and the norm.

Equal tensors have equal fingerprints; tensors that differ by rounding have close ones:
the projections of x and y differ by about `norm(x - y)`. Order matters to it, unlike to
a hash that xors.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from placements.describe import short_dtype

# Weights are drawn once for so many elements, and combined for longer tensors: memory
# does not grow with the tensor.
_BLOCK = 1 << 14
_SEED = 20260917

# How far apart, relative to the norm, tensors of a dtype may be by rounding alone.
_TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}


class Fingerprint(NamedTuple):
    """What is compared between ranks in place of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    projection: float
    norm: float
    tolerance: float

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        projection: float,
        square: float,
        rtol: float | None,
    ) -> "Fingerprint":
        """From what `project` gave; `rtol` in place of what rounding may do."""
        apart = _TOLERANCES.get(dtype, 1e-12) if rtol is None else rtol
        name = short_dtype(str(dtype).removeprefix("torch."))
        return cls(shape, name, projection, square**0.5, apart)

    def agrees(self, other: "Fingerprint") -> bool:
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
        mine, theirs = (self.projection, self.norm), (other.projection, other.norm)
        if mine == theirs:
            return True
        if not all(map(math.isfinite, (*mine, *theirs))):
            # Infinities and NaN drown the rest of the tensor: they must be alike.
            return [math.isnan(a) for a in mine] == [math.isnan(b) for b in theirs] and all(
                a == b or math.isnan(a) for a, b in zip(mine, theirs, strict=True)
            )
        apart = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
        return apart <= self.tolerance * max(self.norm, other.norm)


@lru_cache(maxsize=8)
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn(_BLOCK, dtype=torch.float64, generator=generator)
    return drawn.to(device, dtype)


def project(x: Tensor) -> Tensor:
    """A tensor -> its projection and the square of its norm, still on its device."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    if not x.is_floating_point():
        x = x.double()
    elif x.element_size() < 4:
        x = x.float()
    flat = x.reshape(-1)
    weights = _weights(flat.dtype, flat.device)
    return torch.stack([_dot(flat, weights), torch.dot(flat, flat)])


def _dot(flat: Tensor, weights: Tensor) -> Tensor:
    size = flat.numel()
    if size <= _BLOCK:
        return torch.dot(flat, weights[:size])
    rows = size // _BLOCK
    head, tail = flat[: rows * _BLOCK], flat[rows * _BLOCK :]
    by_row = torch.mv(head.view(rows, _BLOCK), weights)
    rest = torch.dot(tail, weights[: tail.numel()])
    # Other weights for the rows, or a matrix and its transpose would look the same.
    return _dot(torch.cat([by_row, rest[None]]), weights.flip(0))
