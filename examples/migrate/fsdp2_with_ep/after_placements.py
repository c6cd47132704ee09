"""`placements.fully_shard` reads from the declared types over which ranks a parameter is
sharded, and sums. What the loss is divided by is part of the loss: one count of all
tokens. Nothing depends on how the ranks are split into `edp` and `ep`."""

import torch
from torch import Tensor, nn

import placements
from examples.migrate.fsdp2_with_ep.one_device import TOKENS
from placements import (
    P,
    R,
    S,
    all_gather,
    convert,
    declare,
    global_mean,
    reduce_gradients,
    reduce_scatter,
)


class Experts(nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.detach())
        declare(self, {"w": {"edp": R, "ep": S(0)}})

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        rows = all_gather(x, "ep", src=S(0), dst=R)
        everywhere = all_gather(gates, "ep", src=S(0), dst=R)
        mine = convert(everywhere, "ep", src=R, dst=S(1))
        y = torch.einsum("tg,td,gdf->tf", mine, rows, self.w)
        return reduce_scatter(y, "ep", src=P, dst=S(0))


def program(x: Tensor, gates: Tensor, w: Tensor) -> Tensor | None:
    experts = placements.fully_shard(Experts(w))
    total = experts(x.detach(), gates.detach()).square().sum()
    global_mean(total, TOKENS, ("edp", "ep")).backward()
    reduce_gradients(experts)  # what FSDP2 has left, here nothing
    return experts.w.grad
