"""Norms under sequence parallelism.

Each rank of `tp` normalizes its own tokens, which are then gathered for a column-parallel
layer. The weight of the norm is whole on every rank and meets other tokens on each, so its
gradient is a sum over the ranks.
"""

import torch
from torch import Tensor

from placements import I, S

MESH = {"tp": 2}


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


# Every entry is 2 or -2, so the root mean square of each row is a whole number.
INPUTS = {
    "x": 4 * numbers(6, 4, seed=0).gt(0).double() - 2,
    "norm": numbers(4, seed=1),
    "w": numbers(4, 6, seed=2),
}
# What each rank holds of every input and result.
HELD = {"x": {"tp": S(0)}, "norm": {"tp": I}, "w": {"tp": S(1)}}
RESULTS = {"y": {"tp": S(1)}}


def rms_norm(x: Tensor, norm: Tensor) -> Tensor:
    return x * x.square().mean(1, keepdim=True).rsqrt() * norm


def program(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    return rms_norm(x, norm) @ w
