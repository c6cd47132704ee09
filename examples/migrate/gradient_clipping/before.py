"""As in Megatron: a flag of the parameter says whether it is cut. What is not flagged is
taken for a copy, and counted on the first rank alone."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from examples.migrate.gradient_clipping.one_device import MAX_NORM, Heads
from placements.testing import device_mesh


def trained(heads: Heads, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mesh = device_mesh()
    heads(scores.detach()).sum().backward()
    sink, scale = heads.sink.grad, heads.scale.grad
    assert sink is not None and scale is not None
    dist.all_reduce(scale, group=mesh.get_group("tp"))  # its uses are cut over tp
    squares = torch.zeros((), dtype=torch.float64)
    for parameter in heads.parameters():
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        if is_cut or mesh.get_local_rank("tp") == 0:
            squares += parameter.grad.square().sum()
    dist.all_reduce(squares, group=mesh.get_group("tp"))
    norm = squares.sqrt()
    clip_grads_with_norm_(heads.parameters(), MAX_NORM, norm)
    return norm, sink, scale


def program(scores: Tensor, sink: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = Heads(sink, scale)
    heads.sink.tensor_model_parallel = True
    return trained(heads, scores)
