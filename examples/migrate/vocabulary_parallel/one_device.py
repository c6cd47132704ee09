"""Vocabulary-parallel embedding and loss.

The table of the embedding is cut over `tp` along the vocabulary, and serves again as the
last layer, so each rank has the logits of its own classes. Both ends sum over the ranks:
the embedding the rows that one rank found, the loss its sum over classes. (In place of the
log-sum-exp of cross entropy stands a sum of squares, so that all numbers stay whole. It is
summed over classes in the same way.)
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
    "ids": torch.tensor([5, 0, 3, 2, 2]),
    "labels": torch.tensor([0, 3, 2, 2, 4]),
    "table": numbers(6, 4, seed=0),
}
# What each rank holds of every input and result.
HELD = {"ids": {"tp": I}, "labels": {"tp": I}, "table": {"tp": S(0)}}
RESULTS = {"loss": {"tp": I}}


def program(ids: Tensor, labels: Tensor, table: Tensor) -> Tensor:
    logits = table[ids] @ table.T
    target = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    return (logits.square().sum(1) - 2 * target).sum()
