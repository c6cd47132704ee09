"""Clipping by the norm of all gradients.

Some parameters are cut over `tp`, others are whole on every rank. The norm has each element
once: squares of pieces are summed over the ranks, those of copies are not.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from placements import R, S

MESH = {"tp": 4}
MAX_NORM = 6.5

# The gradients are -3 sixteen times, 3 and 4: the norms of all pieces are whole numbers,
# and the norm is 13.
INPUTS = {
    "scores": torch.tensor([[3.0], [4.0]]).double().expand(2, 16) / 16,
    "sink": torch.zeros(16).double(),
    "scale": torch.tensor([1.0, 2.0]).double(),
}
# What each rank holds of every input and result.
HELD = {"scores": {"tp": S(1)}, "sink": {"tp": S(0)}, "scale": {"tp": R}}
RESULTS = {"norm": {"tp": R}, "sink.grad": {"tp": S(0)}, "scale.grad": {"tp": R}}


class Heads(nn.Module):
    """A sink for every head, of which each rank has some, and a scale for every token."""

    def __init__(self, sink: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.sink = nn.Parameter(sink.detach())
        self.scale = nn.Parameter(scale.detach())

    def forward(self, scores: Tensor) -> Tensor:
        return (scores - self.sink) * self.scale.unsqueeze(1)


def program(scores: Tensor, sink: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = Heads(sink, scale)
    heads(scores.detach()).sum().backward()
    norm = clip_grad_norm_(heads.parameters(), MAX_NORM)
    assert heads.sink.grad is not None and heads.scale.grad is not None
    return norm, heads.sink.grad, heads.scale.grad
