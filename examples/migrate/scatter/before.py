"""In DTensor, with torch 2.13, `scatter_` on a cut tensor with fewer tokens than ranks
raises, and `scatter` silently makes it whole on every rank. So the tokens are padded to
the number of ranks, the router runs on plain tensors, and its map is masked."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from examples.migrate.scatter.one_device import chosen_experts
from placements.testing import device_mesh


class CopyToTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=device_mesh().get_group("tp"))
        return grad


class GatherFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(device_mesh().size())]
        dist.all_gather(parts, x.contiguous(), group=device_mesh().get_group("tp"))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(device_mesh().size())[device_mesh().get_local_rank("tp")]


def route(x: Tensor, gate: Tensor, counted: int) -> tuple[Tensor, Tensor]:
    """Route the tokens; of them and the padding behind, the first `counted` rows count."""
    ranks, rank = device_mesh().size(), device_mesh().get_local_rank("tp")
    tokens = x.shape[0]
    padded = pad(CopyToTp.apply(x), (0, 0, 0, -tokens % ranks))
    mine = padded.chunk(ranks)[rank]
    scores = mine @ CopyToTp.apply(gate)
    chosen = chosen_experts(scores)
    counts_here = torch.arange(padded.shape[0]).chunk(ranks)[rank] < counted
    chosen = chosen * counts_here.unsqueeze(1)
    counts = chosen.sum(0).long()
    dist.all_reduce(counts, group=device_mesh().get_group("tp"))
    return GatherFromTp.apply(scores * chosen)[:tokens], counts


def program(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return route(x, gate, counted=x.shape[0])
