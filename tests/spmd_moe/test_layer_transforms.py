"""The layer under the transforms of torch.func, and in forward mode."""

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import functional_call, grad, hessian, jvp, vmap

from placements import PlacementError, set_current_mesh, typecheck
from spmd_moe import MoE
from tests.support.moe import CONFIG

# What torch.func itself uses.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def made(dtype: torch.dtype) -> tuple[MoE, Tensor, Tensor]:
    """A layer, an input, and a direction."""
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(2, 5, CONFIG.dim, generator=generator) for _ in range(2))
    return MoE(CONFIG).to(dtype), x.to(dtype), v.to(dtype)


def loss(moe: MoE, x: Tensor, state: Any = None) -> Tensor:
    y: Tensor = functional_call(moe, state or {}, (x,), {"seq_len": x.shape[-2]})
    return (y**2).sum()


@DTYPES
def test_gradients_and_counts_are_those_of_backward(dtype: torch.dtype) -> None:
    moe, x, _ = made(dtype)
    own, counts_E = dict(moe.named_parameters()), moe.router.balance.counts_E
    with set_current_mesh({}):
        loss(moe, x).backward()
        counted = counts_E.clone()
        counts_E.zero_()
        found = grad(lambda state: loss(moe, x, state))(own)
    assert counts_E.equal(counted) and counted.sum() == 2 * 5 * CONFIG.top_k
    for name, parameter in own.items():
        torch.testing.assert_close(found[name], parameter.grad)


@DTYPES
def test_forward_mode_is_the_gradient_in_a_direction(dtype: torch.dtype) -> None:
    # An op of one's own drops tangents without a word where nothing requires a gradient.
    moe, x, v = made(dtype)
    moe.requires_grad_(False)
    with set_current_mesh({}):
        wanted = (grad(lambda x: loss(moe, x))(x) * v).sum()
        torch.testing.assert_close(jvp(lambda x: loss(moe, x), (x,), (v,))[1], wanted)
        with forward_ad.dual_level():
            y = loss(moe, forward_ad.make_dual(x, v))
            torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, wanted)


def test_second_derivatives() -> None:
    moe, x, _ = made(torch.float64)
    few = x[:1, :2, :]
    with set_current_mesh({}):
        found = hessian(lambda x: loss(moe, x))(few).reshape(few.numel(), -1)
        rows = torch.autograd.functional.hessian(lambda x: loss(moe, x), few)
    torch.testing.assert_close(found, found.mT)
    torch.testing.assert_close(found, rows.reshape(found.shape))  # type: ignore[union-attr]


def test_refusals() -> None:
    moe, x, _ = made(torch.float64)
    with set_current_mesh({}):
        with pytest.raises(RuntimeError, match="samples do not run side by side"):
            vmap(lambda x: loss(moe, x))(x)
        assert moe.router.balance.counts_E.sum() == 0
        with typecheck(), pytest.raises(PlacementError, match="inside a transform"):
            grad(lambda x: loss(moe, x))(x)
