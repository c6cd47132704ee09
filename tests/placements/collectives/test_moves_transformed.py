"""Collectives under the transforms of torch.func: the same gradients, and tangents."""

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from torch import Tensor
from torch.func import grad, jvp, vmap

from placements import (
    I,
    P,
    R,
    S,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_start,
    convert,
    reduce_scatter,
    set_current_mesh,
)
from placements.testing import device_mesh, run_ranks

# What torch.func itself uses.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def uneven(x: Tensor) -> Tensor:
    sizes = ([1, 3], [3, 1])[dist.get_rank()]
    return all_to_all(x, "tp", output_split_sizes=sizes, input_split_sizes=sizes)


CALLS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: all_reduce(x, "tp", src=P, dst=R),
    lambda x: all_reduce(x, "tp", src=P, dst=I),
    lambda x: all_gather(x, "tp", src=S(0), dst=R),
    lambda x: reduce_scatter(x, "tp", src=P, dst=S(0)),
    lambda x: all_to_all(x, "tp", src=S(0), dst=S(1)),
    lambda x: uneven(x),
    lambda x: all_to_all_start(x, "tp", src=S(0), dst=S(1)).wait(),
    lambda x: convert(x, "tp", src=R, dst=P),
    lambda x: convert(x, "tp", src=I, dst=R),
)


def weighed(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    y = call(x)
    weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)
    return (y * y * weights).sum()


def operands() -> tuple[Tensor, Tensor]:
    """Whole numbers in float64: equality is meant."""
    x = torch.arange(8.0, dtype=torch.float64).view(4, 2) + dist.get_rank()
    return x, torch.flip(x, (0,))


def check_gradients(call: Callable[[Tensor], Tensor]) -> None:
    x, v = operands()
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(weighed(call, leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * v).sum(), leaf)

    def gradient(x: Tensor) -> Tensor:
        return grad(lambda x: weighed(call, x))(x)

    assert gradient(x).equal(first)
    assert grad(lambda x: (gradient(x) * v).sum())(x).equal(second)
    with pytest.raises(RuntimeError, match="vmap"):
        vmap(call)(torch.stack([x, x]))


def check_tangents(call: Callable[[Tensor], Tensor]) -> None:
    x, v = operands()
    assert jvp(call, (x,), (v,))[1].equal(call(v))  # they are linear
    with forward_ad.dual_level():
        y = call(forward_ad.make_dual(x, v))
        assert forward_ad.unpack_dual(y).tangent.equal(call(v))


def every(check: Callable[[Callable[[Tensor], Tensor]], None]) -> None:
    with set_current_mesh(device_mesh()):
        for call in CALLS:
            check(call)


def test_gradients_and_second_derivatives() -> None:
    run_ranks({"tp": 2}, every, check_gradients)


def test_tangents() -> None:
    # Levels of forward mode belong to the process, which simulated ranks share.
    run_ranks({"tp": 2}, every, check_tangents, backend="gloo")
