"""It has no clipping, and its types are there only while a checker runs, so a trainer
cannot read them. Which squares are summed is decided by hand, for each parameter."""

import spmd_types as spmd
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from examples.migrate.gradient_clipping.one_device import MAX_NORM, Heads


def declared(scores: Tensor, sink: Tensor, scale: Tensor) -> Heads:
    spmd.assert_type(scores, {"tp": spmd.S(1)})
    with spmd.no_typecheck():
        heads = Heads(sink, scale)
    spmd.assert_type(heads.sink, {"tp": spmd.S(0)})
    spmd.assert_type(heads.scale, {"tp": spmd.R})
    return heads


def trained(heads: Heads, scores: Tensor, cut: set[str]) -> tuple[Tensor, Tensor, Tensor]:
    loss = heads(scores.detach()).sum()
    spmd.all_reduce(loss, "tp", src=spmd.P, dst=spmd.I).backward()
    sink, scale = heads.sink.grad, heads.scale.grad
    assert sink is not None and scale is not None
    with spmd.no_typecheck():
        scale.copy_(spmd.all_reduce(scale.clone(), "tp", src=spmd.P, dst=spmd.R))
        squares = scale.new_zeros(())
        for name, parameter in heads.named_parameters():
            square = parameter.grad.square().sum()
            if name in cut:
                square = spmd.all_reduce(square, "tp", src=spmd.P, dst=spmd.R)
            squares = squares + square
        norm = squares.sqrt()
        clip_grads_with_norm_(heads.parameters(), MAX_NORM, norm)
    return norm, sink, scale


def program(scores: Tensor, sink: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return trained(declared(scores, sink, scale), scores, cut={"sink"})
