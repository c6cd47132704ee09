"""Counts of tokens, and the bias of the experts.

After each step the bias of an expert goes up if fewer tokens than the average chose it,
and down if more did. Every rank has the whole bias, and tokens of its own on `dp` and on
`tp`, so the counts are summed over both.
"""

import torch
from torch import Tensor

from placements import R, S

MESH = {"dp": 2, "tp": 2}
CHOICES, STEP = 2, 0.5


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {"scores": numbers(8, 4, seed=6), "bias": torch.zeros(4).double()}
# What each rank holds of every input and result.
HELD = {"scores": {"dp": S(0), "tp": S(0)}, "bias": {"dp": R, "tp": R}}
RESULTS = {"bias": {"dp": R, "tp": R}}


def counted(scores: Tensor, bias: Tensor) -> Tensor:
    """Return how many of these tokens chose each expert."""
    ids = (scores + bias).detach().topk(CHOICES, 1).indices
    return torch.zeros_like(scores).detach().scatter(1, ids, 1.0).sum(0)


@torch.no_grad()
def updated(bias: Tensor, counts: Tensor) -> Tensor:
    bias.add_(STEP * (counts.mean() - counts).sign())
    return bias.detach()


def program(scores: Tensor, bias: Tensor) -> Tensor:
    return updated(bias, counted(scores, bias))
