"""Drawn numbers that depend on the seed alone; small whole ones, so that sums are exact."""

from collections.abc import Sequence

import torch
from torch import Tensor


def numbers(
    shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return small integers, as that dtype."""
    low, high = (0, 2) if dtype is torch.bool else (-3, 4)
    return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)


def nonzero_numbers(
    shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return small integers other than zero: cotangents, divisors.

    A zero hides what it is multiplied with, and zero times an infinite derivative is not
    the sum of what its parts give.
    """
    drawn = numbers(shape, generator, dtype)
    return drawn + (drawn == 0)


def seeded(*parts: object) -> torch.Generator:
    """Return a generator whose state depends on the parts alone."""
    seed = 0
    for byte in repr(parts).encode():
        seed = (seed * 257 + byte) % (2**61 - 1)
    return torch.Generator().manual_seed(seed)
