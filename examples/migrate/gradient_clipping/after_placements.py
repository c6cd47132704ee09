"""The declared types are all that `reduce_gradients` and `clip_grad_norm_` read: what is
Replicate gets a sum and counts once, what is cut counts on each rank."""

from torch import Tensor

from examples.migrate.gradient_clipping.one_device import MAX_NORM, Heads
from placements import I, P, R, S, all_reduce, clip_grad_norm_, declare, reduce_gradients


def trained(heads: Heads, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    all_reduce(heads(scores.detach()).sum(), "tp", src=P, dst=I).backward()
    reduce_gradients(heads)
    norm = clip_grad_norm_(heads, MAX_NORM)
    assert heads.sink.grad is not None and heads.scale.grad is not None
    return norm, heads.sink.grad, heads.scale.grad


def program(scores: Tensor, sink: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads = Heads(sink, scale)
    declare(heads, {"sink": {"tp": S(0)}, "scale": {"tp": R}})
    return trained(heads, scores)
