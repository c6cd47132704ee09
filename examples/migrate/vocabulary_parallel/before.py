"""As in Megatron: two functions that are each other's backward, and a window of ids that is
computed from the rank. Ids outside of the window are looked up at row 0 and masked."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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


class ReduceFromTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=device_mesh().get_group("tp"))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def in_window(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    first = device_mesh().get_local_rank("tp") * rows
    outside = (ids < first) | (ids >= first + rows)
    return (ids - first).masked_fill(outside, 0), outside.unsqueeze(1)


def vocab_parallel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    row, outside = in_window(labels, logits.shape[1])
    target = logits.gather(1, row.unsqueeze(1)).masked_fill(outside, 0).squeeze(1)
    total = ReduceFromTp.apply(logits.square().sum(1))
    return (total - 2 * ReduceFromTp.apply(target)).sum()


def program(ids: Tensor, labels: Tensor, table: Tensor) -> Tensor:
    row, outside = in_window(ids, table.shape[0])
    x = ReduceFromTp.apply(table[row].masked_fill(outside, 0))
    return vocab_parallel_loss(CopyToTp.apply(x) @ table.T, labels)
