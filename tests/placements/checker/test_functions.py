"""A custom autograd.Function says by a rule what it does, or both halves are checked."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    convert,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from tests.support.checked import mesh_of

mesh = mesh_of(tp=4)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2


class DeclaredTwice(Twice):
    @staticmethod
    def placement_rule(x: Any) -> Any:
        return x


def test_both_halves_of_a_function_without_a_rule_are_checked() -> None:
    with typecheck():
        x = assert_type(torch.randn(3, requires_grad=True), {"tp": S(0)})
        assert type_of(Twice.apply(x)) == {"tp": S(0)}
        assert type_of(DeclaredTwice.apply(x)) == {"tp": S(0)}
        Twice.apply(x).sum().backward()
        assert type_of(x.grad) == {"tp": S(0)}
        assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert type_of(Twice.apply(torch.ones(2))) is None


class Scaled(torch.autograd.Function):
    """x * w with w broadcast over the rows; the sum over the rows is in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, flag: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).sum(0), None


def test_a_sum_in_a_backward_gives_what_the_parameter_demands() -> None:
    with typecheck():
        x = assert_type(torch.randn(2, 3, requires_grad=True), {"tp": S(0)})
        w = assert_type(torch.randn(3, requires_grad=True), {"tp": R})
        Scaled.apply(x, w, True).sum().backward()
        assert type_of(w.grad) == {"tp": P}
    assert torch.allclose(w.grad, x.detach().sum(0))


class SumsTooMuch(Scaled):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return (grads[0] * w).sum(0, keepdim=True).expand_as(x), (grads[0] * x).sum(0), None


def test_a_backward_that_gives_another_type_is_refused() -> None:
    with typecheck():
        x = assert_type(torch.randn(2, 3, requires_grad=True), {"tp": S(0)})
        w = assert_type(torch.randn(3, requires_grad=True), {"tp": R})
        y = SumsTooMuch.apply(x, w, True).sum()
        with pytest.raises(PlacementError):
            y.backward()


class Clipped(Twice):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].clip(-1.0, 1.0)


def test_a_backward_that_clips_a_summand_is_refused() -> None:
    with typecheck():
        w = assert_type(torch.randn(3, requires_grad=True), {"tp": R})
        x = assert_type(torch.randn(2, 3), {"tp": S(0)})
        loss = (Clipped.apply(w) * x).sum()
        with pytest.raises(PlacementError, match="clip") as caught:
            loss.backward()
        assert "non-linear function of a sum" in str(caught.value)


def test_a_backward_outside_of_the_block_is_checked_too() -> None:
    with typecheck():
        w = assert_type(torch.randn(3, requires_grad=True), {"tp": R})
        x = assert_type(torch.randn(2, 3), {"tp": S(0)})
        loss = (Clipped.apply(w) * x).sum()
    with pytest.raises(PlacementError, match="non-linear function of a sum"):
        loss.backward()


class Kernel(Twice):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out.numpy(force=True)[:] = x.numpy(force=True)[::-1]  # as a kernel would, unseen
        return out


class Untyped(Twice):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy().copy())


@pytest.mark.parametrize("function", [Kernel, Untyped])
def test_what_is_not_seen_of_a_function_must_be_declared(function: Any) -> None:
    with typecheck():
        x = assert_type(torch.randn(3, requires_grad=True), {"tp": S(0)})
        with pytest.raises(PlacementError, match=rf"{function.__name__}\.apply") as caught:
            function.apply(x)
        assert "placement_rule" in str(caught.value)


class SumsGradients(Twice):
    """As the functions of tensor parallelism that are found in many trainers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dist.all_reduce(grads[0])
        return grads[0]


def _sum_gradients() -> str:
    with set_current_mesh(device_mesh()), typecheck():
        x = assert_type(torch.ones(3, requires_grad=True), {"tp": R})
        loss = SumsGradients.apply(x).sum()
        with pytest.raises(PlacementError) as caught:
            convert(loss, "tp", src=R, dst=I).backward()
        return str(caught.value)


def test_a_raw_collective_in_a_backward_is_refused() -> None:
    for error in run_ranks({"tp": 2}, _sum_gradients):
        assert "a raw torch.distributed collective" in error


def test_gradients_of_gradients_pass_a_checked_backward() -> None:
    with typecheck():
        x = assert_type(torch.randn(3, requires_grad=True), {"tp": S(0)})
        (grad,) = torch.autograd.grad((Twice.apply(x) ** 2).sum(), x, create_graph=True)
        grad.sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 8.0))


class Rule(Twice):
    @staticmethod
    def placement_rule(x: Any) -> Any:
        return {"tp": V}


def test_a_placement_rule_may_return_a_plain_mapping() -> None:
    with typecheck():
        x = assert_type(torch.ones(3), {"tp": V})
        assert type_of(Rule.apply(x)) == {"tp": V}
