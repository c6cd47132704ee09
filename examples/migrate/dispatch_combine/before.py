"""As torchtitan and Megatron do it: sort by expert, tell every rank how many rows come,
and send by a function whose backward sends the gradients back."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.migrate.dispatch_combine.one_device import EXPERTS, SPARSE
from placements.testing import device_mesh


def send(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    arrived = x.new_empty(sum(received), *x.shape[1:])
    group = device_mesh(SPARSE).get_group("ep")
    dist.all_to_all_single(arrived, x.contiguous(), received, sent, group=group)
    return arrived


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.splits = sent, received
        return send(x, sent, received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.splits
        return send(grad, received, sent), None, None


def splits(ids: Tensor) -> tuple[list[int], list[int]]:
    sent = torch.bincount(ids, minlength=EXPERTS)
    return sent.tolist(), send(sent, [1] * EXPERTS, [1] * EXPERTS).tolist()


def program(x: Tensor, gates: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    sent, received = splits(ids)
    order = ids.argsort(stable=True)
    rows = AllToAll.apply(x[order], sent, received)
    weights = AllToAll.apply(gates[order], sent, received)
    computed = (rows @ w[0]) * weights.unsqueeze(1)
    return AllToAll.apply(computed, received, sent)[order.argsort()]
