"""Dispatch and combine over `ep`, on a sparse mesh.

Tokens are cut over `dp` and `tp`. The same four ranks, seen as the one axis `ep`, hold one
expert each. Rows and their gates travel to the rank of their expert, are computed there,
and travel back to their token. How many go where depends on the data.
"""

import torch
from torch import Tensor

from placements import S

MESH = {"dp": 2, "tp": 2}
SPARSE = {"ep": 4}
EXPERTS = 4


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {
    "x": numbers(12, 3, seed=0),
    "gates": numbers(12, seed=1),
    "ids": torch.tensor([0, 2, 1, 1, 0, 3, 2, 2, 2, 0, 1, 0]),
    "w": numbers(EXPERTS, 3, 3, seed=2),
}
# What each rank holds of every input and result.
CUT = {"dp": S(0), "tp": S(0)}
HELD = {"x": CUT, "gates": CUT, "ids": CUT, "w": CUT}
RESULTS = {"y": CUT}


def program(x: Tensor, gates: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("td,tdf->tf", x, w[ids]) * gates.unsqueeze(1)
