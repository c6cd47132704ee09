"""Column and row parallel layers, and shared experts.

The first weight is cut along its columns and the second along its rows, so that nothing is
sent between them; their product is one summand per rank. The shared expert is not cut.
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
    "shared": numbers(4, 4, seed=3),
}
# What each rank holds of every input and result.
HELD = {"x": {"tp": I}, "w1": {"tp": S(1)}, "w2": {"tp": S(0)}, "shared": {"tp": I}}
RESULTS = {"y": {"tp": I}}


def program(x: Tensor, w1: Tensor, w2: Tensor, shared: Tensor) -> Tensor:
    return (x @ w1).square() @ w2 + x @ shared
