"""Regions of plain tensors: `local_map`.

Experts whose kernels know plain tensors only run in a region, at whose boundary the types
of what goes in and comes out are declared. Those of the gradients belong to the
declaration: inside of the region nobody can find them out later.
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
    "w1": numbers(4, 6, seed=1),
    "w2": numbers(6, 4, seed=2),
}
# What each rank holds of every input and result.
HELD = {"x": {"tp": I}, "w1": {"tp": S(1)}, "w2": {"tp": S(0)}}
RESULTS = {"y": {"tp": I}}


def experts(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return (x @ w1).square() @ w2


def program(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return experts(x, w1, w2)
