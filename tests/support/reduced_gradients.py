"""One parameter whose gradient is 10**r on rank r, and ways to reduce that gradient.

A sum over two ranks is 11, and a sum that is done twice is 22."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from placements import (
    P,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    clip_grad_norm_,
    declare,
    reduce_gradients,
    set_current_mesh,
    typecheck,
)
from placements._torch import unseen
from placements.testing import device_mesh

sum_dp = partial(all_reduce, axis="dp", src=P, dst=R)


class Scale(nn.Module):
    """y = w * x, with the type of w as it is declared."""

    def __init__(self, types: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.float64))
        declare(self, {"w": types})

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def backward(scale: Scale, types: Any, times: int = 1, **options: Any) -> None:
    x = torch.full((1, 2), 10.0 ** dist.get_rank(), dtype=torch.float64)
    loss = scale(assert_type(x, types)).sum()
    for k in range(times):
        loss.backward(retain_graph=k + 1 < times or None, **options)


Do = Callable[[Scale, Callable[..., None]], None]


def a_post_hook(m: Scale, backward: Any) -> None:
    def assign(p: Tensor) -> None:
        p.grad = sum_dp(p.grad)

    m.w.register_post_accumulate_grad_hook(assign)
    backward()


def an_assignment(m: Scale, backward: Any) -> None:
    backward()
    m.w.grad = sum_dp(m.w.grad)


def accumulate_node(m: Scale) -> Any:
    with unseen():
        return torch.autograd.graph.get_gradient_edge(m.w).node


def outcome(do: Do, checked: bool, then: str) -> Any:
    """The gradient after `do` and what follows, or the error."""
    mesh, scale = device_mesh(), Scale({"dp": R})
    with set_current_mesh(mesh), typecheck() if checked else nullcontext():
        try:
            do(scale, partial(backward, scale, {"dp": S(0)}))
            norm = None
            if then != "clip":
                reduce_gradients(scale)
            if then != "reduce":
                norm = float(clip_grad_norm_(scale, 1e9))
        except PlacementError as error:
            return error
    assert scale.w.grad is not None
    values = scale.w.grad.tolist()
    assert values[0] == values[1]
    assert norm is None or norm == pytest.approx(values[0] * 2**0.5)
    return values[0]
