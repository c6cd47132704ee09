"""Leaving DTensor for a while, and coming back: `to_local()` and `from_local()`.

A router scores tokens by a small weight that every rank of `tp` holds whole. The experts
that use the scores are cut over `tp`, so they run on plain tensors, and the scores must
leave DTensor. What `to_local()` says about the gradient decides whether the router learns
right.
"""

import torch
from torch import Tensor

from placements import I, S

MESH = {"tp": 2}


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {
    "x": numbers(5, 4, seed=0),
    "gate": numbers(4, 1, seed=1),
    "w": numbers(4, 6, seed=2),
}
# What each rank holds of every input and result.
HELD = {"x": {"tp": I}, "gate": {"tp": I}, "w": {"tp": S(1)}}
RESULTS = {"y": {"tp": S(1)}}


def program(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    return (x @ w) * (x @ gate)
