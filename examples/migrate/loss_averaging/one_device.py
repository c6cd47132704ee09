"""The mean of a loss over tokens that are cut over data ranks.

Each rank of `dp` has its own number of valid tokens. The mean over all of them is one sum
over one count.
"""

import torch
from torch import Tensor

from placements import I, S

MESH = {"dp": 2}


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


VALID = torch.tensor([1, 1, 1, 0, 1, 0])  # three valid tokens here, one there
INPUTS = {"x": numbers(6, 4, seed=0), "w": numbers(4, 1, seed=1), "valid": VALID}
# What each rank holds of every input and result.
HELD = {"x": {"dp": S(0)}, "w": {"dp": I}, "valid": {"dp": S(0)}}
RESULTS = {"loss": {"dp": I}}


def program(x: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    losses = (x @ w).square().squeeze(1) * valid
    return losses.sum() / valid.sum()
