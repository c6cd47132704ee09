"""Modules as a user has them: one that sums over tp, and one that forgets to."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn

from placements import I, On, P, S, all_reduce, typed


@typed
class Sums(nn.Module):
    def forward(
        self, x_TD: Annotated[Float[Tensor, "T D"], On(tp=S(1))]
    ) -> Annotated[Float[Tensor, " T"], On(tp=I)]:
        return all_reduce(x_TD.sum(1), "tp", src=P, dst=I)


@typed
class Forgets(nn.Module):
    def forward(
        self, x_TD: Annotated[Float[Tensor, "T D"], On(tp=S(1))]
    ) -> Annotated[Float[Tensor, " T"], On(tp=I)]:
        return torch.sum(x_TD, 1)
