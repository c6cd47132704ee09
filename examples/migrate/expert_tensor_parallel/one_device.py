"""Expert tensor parallelism: the hidden units of each expert cut over `etp`.

As for column and row parallel layers, every rank computes one summand of the experts'
output. The experts' second bias is whole, and belongs to the sum, once.
"""

import torch
from torch import Tensor

from placements import I, S

MESH = {"etp": 2}


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {
    "rows": numbers(2, 3, 4, seed=0),  # experts, rows of each, dim
    "w1": numbers(2, 4, 6, seed=1),
    "w2": numbers(2, 6, 4, seed=2),
    "bias": numbers(2, 1, 4, seed=3),
}
# What each rank holds of every input and result.
HELD = {"rows": {"etp": I}, "w1": {"etp": S(2)}, "w2": {"etp": S(1)}, "bias": {"etp": I}}
RESULTS = {"y": {"etp": I}}


def program(rows: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(rows, w1).square(), w2) + bias
