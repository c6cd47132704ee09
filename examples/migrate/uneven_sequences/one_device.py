"""Sequences whose length does not divide.

Five tokens are cut over two ranks of `tp`: three and two. Each rank computes its own, and
the output has all of them on every rank.
"""

import torch
from torch import Tensor

from placements import I, Padded, S

MESH = {"tp": 2}
TOKENS = 5


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {"x": numbers(TOKENS, 4, seed=0)}
# What each rank holds of every input and result.
HELD = {"x": {"tp": S(0, Padded(TOKENS))}}
RESULTS = {"y": {"tp": I}}


def program(x: Tensor) -> Tensor:
    return x.square()
