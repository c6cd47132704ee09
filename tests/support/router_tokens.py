"""Tokens and their scores on dp=2, tp=4, as a router has them."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from placements import R, S, assert_type

B, L, D, E, K = 2, 3, 8, 4, 2
TOKENS = {"dp": S(0), "tp": S(1)}


def tokens() -> Tensor:
    return assert_type(torch.randn(B, L, D), TOKENS)


def scores() -> Tensor:
    w = assert_type(torch.randn(E, D), {"dp": R, "tp": R})
    return torch.sigmoid(linear(tokens(), w))
