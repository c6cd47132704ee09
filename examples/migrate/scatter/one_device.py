"""Scatter into a routing map, with fewer tokens than ranks.

The router marks the experts of each token by a scatter along the dim of the experts, which
nobody cuts. Tokens are cut over `tp`. While a text is generated there may be one token for
two ranks, so one rank has none.
"""

import torch
from torch import Tensor

from placements import I

MESH = {"tp": 2}
CHOICES = 2


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {"x": numbers(1, 4, seed=0), "gate": numbers(4, 6, seed=1)}
# What each rank holds of every input and result.
HELD = {"x": {"tp": I}, "gate": {"tp": I}}
RESULTS = {"gates": {"tp": I}, "counts": {"tp": I}}


def chosen_experts(scores: Tensor) -> Tensor:
    """Return one for each expert that a token chose."""
    ids = scores.detach().topk(CHOICES, 1).indices
    return torch.zeros_like(scores).scatter(1, ids, 1.0)


def program(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    scores = x @ gate
    chosen = chosen_experts(scores)
    return scores * chosen, chosen.sum(0).long()
