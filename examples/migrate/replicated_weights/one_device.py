"""A weight that is whole on every rank, under sequence parallelism.

Each rank of `tp` holds some of the tokens, and all of the router. So each rank computes a
summand of the router's gradient, and somebody has to add them up, once.
"""

import torch
from torch import Tensor

from placements import I, S

MESH = {"tp": 2}


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {"x": numbers(6, 4, seed=0), "gate": numbers(4, 3, seed=1)}
# What each rank holds of every input and result.
HELD = {"x": {"tp": S(0)}, "gate": {"tp": I}}
RESULTS = {"scores": {"tp": S(0)}}


def program(x: Tensor, gate: Tensor) -> Tensor:
    return x @ gate
