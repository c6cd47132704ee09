"""A few numbers that tell tensors apart: a random projection, the norm, and a hash.

Equal tensors have equal fingerprints; tensors that differ by rounding have close ones:
the projections of x and y differ by about `norm(x - y)`. What rounding cannot change is
hashed, and the hashes must be equal: whole numbers, and the places where floats are not
finite (these count as zero in the projection). All of it depends on the order of elements.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from placements.runtime.describe import short_dtype
from placements.runtime.dtensors import local_part

# Weights are drawn once for so many elements, and combined for longer tensors: memory
# does not grow with the tensor.
_BLOCK = 1 << 14
_SEED = 20260917

# Squares of larger numbers, and their sums, would be infinite.
_LARGEST = 1e100

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
    exact: tuple[float, float]  # the halves of a hash of 64 bits
    tolerance: float

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        projected: Sequence[float],
        rtol: float | None,
    ) -> "Fingerprint":
        """Make one from the numbers of `project`; `rtol` replaces the dtype's tolerance."""
        apart = _TOLERANCES.get(dtype, 1e-12) if rtol is None else rtol
        name = short_dtype(str(dtype).removeprefix("torch."))
        projection, square, high, low = projected
        return cls(shape, name, projection, square**0.5, (high, low), apart)

    def agrees(self, other: "Fingerprint") -> bool:
        mine, theirs = (
            (self.shape, self.dtype, self.exact),
            (other.shape, other.dtype, other.exact),
        )
        if mine != theirs:
            return False
        apart = max(abs(self.projection - other.projection), abs(self.norm - other.norm))
        return apart <= self.tolerance * max(self.norm, other.norm)


@lru_cache(maxsize=8)
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn(_BLOCK, dtype=torch.float64, generator=generator)
    return drawn.to(device, dtype)


@lru_cache(maxsize=2)
def _odd(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randint(2**62, (_BLOCK,), generator=generator)
    return (2 * drawn + 1).to(device)


def project(x: Tensor) -> Tensor:
    """A tensor -> projection, square of the norm, halves of the hash; on its device.

    Of a DTensor, as FSDP2 makes of gradients, what this rank holds.
    """
    x = local_part(x.detach())[0]
    if x.is_complex():
        x = torch.view_as_real(x)
    flat = x.reshape(-1)
    if not flat.is_floating_point():
        return torch.cat([_projected(flat.double()), _halves(_hash(flat.long()))])
    wide = flat.float() if flat.element_size() < 4 else flat
    # On another device than the CPU the program would have to wait for the answer.
    if flat.is_cpu:
        projection, square = _dot(wide, _weights(wide.dtype, wide.device)), wide.dot(wide)
        numbers = float(projection), float(square)
        if all(map(math.isfinite, numbers)):
            return torch.tensor([*numbers, 0.0, 0.0], dtype=torch.float64)
    kinds = flat.isnan() + 2 * flat.isposinf() + 4 * flat.isneginf()
    finite = flat.double().nan_to_num(0.0, 0.0, 0.0).clamp(-_LARGEST, _LARGEST)
    return torch.cat([_projected(finite), _halves(_hash(kinds.long()))])


def _projected(flat: Tensor) -> Tensor:
    weights = _weights(flat.dtype, flat.device)
    return torch.stack([_dot(flat, weights), torch.dot(flat, flat)]).double()


def _halves(hashed: Tensor) -> Tensor:
    """Return 64 bits as two numbers that float64 holds."""
    return torch.stack([hashed >> 32, hashed & 0xFFFFFFFF]).double()


def _hash(flat: Tensor) -> Tensor:
    """Return the sum of the numbers times odd ones, modulo 2**64."""
    return _sum_of_products(flat, _odd(flat.device))


def _sum_of_products(flat: Tensor, weights: Tensor) -> Tensor:
    size = flat.numel()
    if size <= _BLOCK:
        return (flat * weights[:size]).sum()
    rows = -(-size // _BLOCK)
    padded = torch.nn.functional.pad(flat, (0, rows * _BLOCK - size))
    return _sum_of_products((padded.view(rows, _BLOCK) * weights).sum(1), weights.flip(0))


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
