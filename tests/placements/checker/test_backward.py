"""Gradients have the dual type, and backward starts from a loss that is one number."""

import pytest
import torch

from placements import (
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    reinterpret,
    type_of,
    typecheck,
)
from tests.support.checked import checked_on
from tests.support.checked import random_of as of

checked = checked_on(tp=4)


def test_the_gradient_has_the_dual_type() -> None:
    for t, gradient in ((R, P), (S(0), S(0)), (P, R)):
        x = of(t).requires_grad_()
        loss = (x * 2).sum()
        if type_of(loss) == {"tp": R}:
            loss = reinterpret(loss, "tp", src=R, dst=P)
        loss.backward()
        grad = x.grad
        assert grad is not None and type_of(grad) == {"tp": gradient}
        (again,) = torch.autograd.grad(
            (x * 3).sum() if t != R else reinterpret((x * 3).sum(), "tp", src=R, dst=P), x
        )
        assert type_of(again) == {"tp": gradient}


@pytest.mark.parametrize("t", ["R", "V"])
def test_backward_from_a_loss_that_is_not_one_number_is_refused(t: str) -> None:
    with typecheck():
        loss = assert_type(torch.ones((), requires_grad=True), {"tp": t})
        with pytest.raises(PlacementError) as caught:
            loss.backward()
        assert caught.value.axis == "tp" and caught.value.fixes


def test_backward_checks_the_gradient_that_is_handed_in() -> None:
    with typecheck():
        y = assert_type(torch.ones(3, requires_grad=True), {"tp": R}) * 2
        wrong = assert_type(torch.randn(3), {"tp": R})
        with pytest.raises(PlacementError, match="dual of its type"):
            y.backward(wrong)
        y.backward(assert_type(torch.randn(3), {"tp": P}))


def test_reinterpreted_losses_reach_backward() -> None:
    with typecheck():
        loss = assert_type(torch.ones((), requires_grad=True), {"tp": V})
        reinterpret(loss, "tp", src=V, dst=P).backward()
