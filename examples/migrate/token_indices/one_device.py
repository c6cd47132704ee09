"""Which token is this row? Flatten and token indices.

Sequences are cut over `tp`, and each rank flattens its piece of the batch to rows. What is
computed for a row goes back to the place of its token among all tokens. The rows of one
rank are no run of that order: each sequence gives it a run of its own.
"""

import torch
from torch import Tensor

from placements import I, S

MESH = {"tp": 2}
SEQUENCES, LENGTH = 2, 4


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {"x": numbers(SEQUENCES, LENGTH, 4, seed=0)}
# What each rank holds of every input and result.
HELD = {"x": {"tp": S(1)}}
RESULTS = {"y": {"tp": I}}


def program(x: Tensor) -> Tensor:
    return x.flatten(0, 1).square()
