"""What a training loop has around its steps: hooks, schedulers, zeroed gradients, averages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from placements import I, R, S, assert_type, declare, set_current_mesh, type_of, typecheck
from placements.testing import run_ranks
from tests.support.trained import AXES, TYPES, on_a_rank, on_one_device
from tests.support.trained_equal import check_equal


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def with_hooks(model: nn.Module) -> torch.optim.Optimizer:
    """Full backward hooks that only look, and forward hooks."""
    hooked: Any = model
    hooked.register_full_backward_hook(lambda module, ins, outs: None)
    hooked.register_full_backward_pre_hook(lambda module, outs: None)
    # A full backward hook wants an input with a gradient.
    hooked.register_forward_pre_hook(lambda m, args: (args[0] * (m.bias[0] * 0 + 2),))
    hooked.register_forward_hook(lambda module, args, out: out * 0.5)
    return sgd(model)


def with_a_schedule(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    optimizer.register_step_post_hook(lambda *args: schedule.step())
    return optimizer


def zeroing_in_place(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *args: optimizer.zero_grad(set_to_none=False))
    return optimizer


LOOPS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    with_hooks,
    with_a_schedule,
    zeroing_in_place,
]


@pytest.mark.parametrize("make", LOOPS)
def test_the_loop_is_that_of_one_device(make: Any) -> None:
    check_equal(run_ranks(AXES, on_a_rank, make), on_one_device(make), TYPES)


def test_a_gradient_that_begins_with_zeros() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.ones(2, 3, requires_grad=True), {"a": S(0)})
        x.grad = torch.zeros_like(x)
        (x * 3).sum().backward()
        assert x.grad is not None and type_of(x.grad) == {"a": S(0)}
        assert torch.equal(x.grad, torch.full((2, 3), 3.0))


def test_an_average_of_a_model() -> None:
    linear = nn.Linear(2, 2)
    averaged = torch.optim.swa_utils.AveragedModel(linear)
    declare(linear, {"*": {"a": I}})
    declare(averaged, {"*": {"a": I}})
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.ones(1, 2), {"a": I})
        linear(x)
        averaged(x)
        averaged.update_parameters(linear)
        with torch.no_grad():
            linear.weight.mul_(3)
        averaged.update_parameters(linear)
        assert type_of(averaged(x)) == {"a": I}
    torch.testing.assert_close(averaged.module.weight, linear.weight * 2 / 3)


@pytest.mark.parametrize("make", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
def test_blocks_of_torch_are_built_inside(make: Any) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        block = make(4, 2)
        declare(block, {"*": {"a": R}})
    assert sum(p.numel() for p in block.parameters()) > 0


def test_initial_values_of_typed_tensors() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.empty(2, 3), {"a": R})
        for fill in (nn.init.zeros_, nn.init.ones_, lambda t: nn.init.constant_(t, 2.0)):
            assert type_of(fill(x)) == {"a": R}
        assert torch.equal(x, torch.full((2, 3), 2.0))
