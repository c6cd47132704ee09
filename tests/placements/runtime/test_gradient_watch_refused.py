"""Reductions of a gradient that cannot be followed are refused with the truth."""

from contextlib import nullcontext
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
    assert_type,
    convert,
    reduce_gradients,
    set_current_mesh,
    typecheck,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from tests.support.reduced_gradients import (
    Do,
    Scale,
    a_post_hook,
    accumulate_node,
    an_assignment,
    outcome,
    sum_dp,
)


def only_the_first_backward(m: Scale, backward: Any) -> None:
    handle = m.w.register_hook(sum_dp)
    backward()
    handle.remove()
    backward()


def only_the_last_backward(m: Scale, backward: Any) -> None:
    backward()
    m.w.register_hook(sum_dp)
    backward()


def a_sum_out_of_place(m: Scale, backward: Any) -> None:
    handle = m.w.register_hook(sum_dp)
    backward()
    handle.remove()
    backward(create_graph=True)


def a_hook_that_divides_last(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: sum_dp(g) / 2)
    backward()


def a_post_hook_in_every_backward(m: Scale, backward: Any) -> None:
    a_post_hook(m, backward)
    backward()


def a_post_hook_that_copies(m: Scale, backward: Any) -> None:
    def copy(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p.grad.copy_(sum_dp(p.grad))

    m.w.register_post_accumulate_grad_hook(copy)
    backward()


def backward_after_an_assignment(m: Scale, backward: Any) -> None:
    an_assignment(m, backward)
    backward()


def two_sums(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: sum_dp(sum_dp(g)))
    backward()


def a_hook_after_reduce_gradients(m: Scale, backward: Any) -> None:
    backward()
    reduce_gradients(m)
    m.w.register_hook(sum_dp)
    backward()
    m.w.register_hook(lambda g: None)
    reduce_gradients(m)


def a_hook_that_writes_data(m: Scale, backward: Any) -> None:
    def write(g: Tensor) -> None:
        g.data.copy_(sum_dp(g))

    m.w.register_hook(write)
    backward()


def a_hook_that_divides_before_and_after(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: sum_dp(g / 2) / 3)
    backward()


def a_hook_that_keeps_a_quotient(m: Scale, backward: Any) -> None:
    def quotient(g: Tensor) -> Tensor:
        half = sum_dp(g) / 2
        sum_dp(half.abs())
        return half

    m.w.register_hook(quotient)
    backward()


def a_post_hook_that_divides_last(m: Scale, backward: Any) -> None:
    def assign(p: Tensor) -> None:
        p.grad = sum_dp(p.grad) / 1

    m.w.register_post_accumulate_grad_hook(assign)
    backward()


def a_post_hook_that_divides_twice(m: Scale, backward: Any) -> None:
    def assign(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = sum_dp(p.grad / 2) / 2

    m.w.register_post_accumulate_grad_hook(assign)
    backward()


def a_post_hook_that_divides_last_again(m: Scale, backward: Any) -> None:
    a_post_hook_that_divides_last(m, backward)
    m.w.grad = None
    backward()


def a_hook_of_the_node_that_divides_last(m: Scale, backward: Any) -> None:
    node = accumulate_node(m)
    node.register_prehook(lambda gs: (sum_dp(gs[0]) / 2,))
    backward()


def a_hook_more_in_every_backward(m: Scale, backward: Any) -> None:
    for _ in range(2):
        m.w.register_hook(sum_dp)
        backward()


def out_of_place_after_reduce_gradients(m: Scale, backward: Any) -> None:
    backward()
    reduce_gradients(m)
    backward(create_graph=True)


REFUSED: list[tuple[Do, str]] = [
    (a_hook_that_writes_data, "handed to a sum .* and written in place since"),
    (a_hook_that_divides_before_and_after, "returned another tensor than the result"),
    (a_hook_that_keeps_a_quotient, "returned another tensor than the result"),
    (a_post_hook_that_divides_last, "another tensor than the result, or assigned one"),
    (a_post_hook_that_divides_last_again, "another tensor than the result"),
    (a_post_hook_that_divides_twice, "another tensor than the result, or assigned one"),
    (a_hook_of_the_node_that_divides_last, "another tensor than the result"),
    (a_hook_more_in_every_backward, "passes .* in different ways|but it was Replicate"),
    (out_of_place_after_reduce_gradients, "backward added to the gradient of 'w' after"),
    (only_the_first_backward, "backward added to the gradient of 'w' after it was reduced"),
    (only_the_last_backward, "passes that were reduced in different ways"),
    (a_sum_out_of_place, "backward added to the gradient of 'w' after it was reduced"),
    (a_hook_that_divides_last, "returned another tensor than the result"),
    (a_post_hook_in_every_backward, "written in place since"),
    (a_post_hook_that_copies, "handed to a sum .* and written in place since"),
    (backward_after_an_assignment, "after it was reduced|written in place since"),
    (two_sums, "took it for Partial, but it was Replicate: every rank's whole gradient"),
    (a_hook_after_reduce_gradients, "was reduced already"),
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("then", ["clip", "reduce"])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("do", "says"), REFUSED, ids=lambda v: getattr(v, "__name__", ""))
def test_what_is_not_known_is_refused_with_the_truth(
    do: Do, says: str, checked: bool, then: str
) -> None:
    for error in run_ranks({"dp": 2}, outcome, do, checked, then):
        assert isinstance(error, PlacementError), error
        with pytest.raises(PlacementError, match=says):
            raise error
        assert "reduce_gradients(module) first" not in str(error)
        assert error.name in ("w", "f64[2]{dp:R}")


def copied(m: Scale, backward: Any) -> None:
    backward()
    assert m.w.grad is not None
    m.w.grad.copy_(sum_dp(m.w.grad))


def divided_and_assigned(m: Scale, backward: Any) -> None:
    backward()
    m.w.grad = sum_dp(m.w.grad) / 2


def of_another_type(m: Scale, backward: Any) -> None:
    backward()
    assert m.w.grad is not None
    m.w.grad = convert(sum_dp(m.w.grad), "dp", src=R, dst=S(0)).repeat(2)


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (copied, "copy_ .* is Partial on axis 'dp'"),
        (divided_and_assigned, "not the result of a typed collective"),
        (of_another_type, "."),
    ],
)
def test_in_a_block_assignments_are_checked(do: Do, says: str) -> None:
    for error in run_ranks({"dp": 2}, outcome, do, True, "clip"):
        with pytest.raises(PlacementError, match=says):
            raise error


def copied_as_data(m: Scale, backward: Any) -> None:
    backward()
    assert m.w.grad is not None
    m.w.grad.data.copy_(sum_dp(m.w.grad.data))


def copied_detached(m: Scale, backward: Any) -> None:
    backward()
    assert m.w.grad is not None
    g = m.w.grad.detach()
    g.copy_(sum_dp(g))


@pytest.mark.parametrize("then", ["clip", "reduce", "both"])
def test_a_sum_that_becomes_the_data_is_not_summed_again(then: str) -> None:
    """Recognised, or refused: that depends on how often the result was written."""
    for found in run_ranks({"dp": 2}, outcome, in_place_of_data, False, then):
        assert found == 11 or "written in place since" in str(found)


def in_place_of_data(m: Scale, backward: Any) -> None:
    backward()
    assert m.w.grad is not None
    m.w.grad.data = sum_dp(m.w.grad)


@pytest.mark.parametrize("then", ["clip", "reduce"])
@pytest.mark.parametrize("do", [copied, copied_as_data, copied_detached])
def test_a_copy_with_checking_off_is_refused(do: Do, then: str) -> None:
    for error in run_ranks({"dp": 2}, outcome, do, False, then):
        with pytest.raises(PlacementError, match=r"(handed to a sum|reduced) .* written"):
            raise error
        assert "reduce_gradients(module) first" not in str(error)


def wrong_source(checked: bool) -> None:
    """The gradient of an Invariant is whole on every rank."""
    scale = Scale({"dp": I})
    with set_current_mesh(device_mesh()), typecheck() if checked else nullcontext():
        scale.w.register_hook(sum_dp)
        x = assert_type(torch.ones(1, 2, dtype=torch.float64), {"dp": I})
        scale(x).sum().backward()
        assert not checked, "refused in backward"
        reduce_gradients(scale)


@pytest.mark.parametrize("checked", [False, True])
def test_a_hook_checks_what_it_is_given(checked: bool) -> None:
    with pytest.raises(RankFailure, match="took it for Partial, but it was Invariant"):
        run_ranks({"dp": 2}, wrong_source, checked)


def hook_of_a_value(sound: bool) -> Any:
    scale = Scale({"dp": R})
    with set_current_mesh(device_mesh()), typecheck():
        x = torch.full((1, 2), 10.0 ** dist.get_rank(), dtype=torch.float64)
        y = scale(assert_type(x, {"dp": S(0)}))
        h = assert_type(scale.w, {"dp": R}) * 2
        if sound:
            h.register_hook(lambda g: convert(sum_dp(g), "dp", src=R, dst=P))
        else:
            h.register_hook(sum_dp)
        (h * y).sum().backward()
        reduce_gradients(scale)
    assert scale.w.grad is not None
    return scale.w.grad.tolist()


def test_a_gradient_that_flows_on_keeps_its_type() -> None:
    with pytest.raises(RankFailure, match="a hook changes the gradient that flows on"):
        run_ranks({"dp": 2}, hook_of_a_value, False)
    # y = w x and h = 2 w: the gradient of h y = 2 w^2 x is 4 w x.
    assert run_ranks({"dp": 2}, hook_of_a_value, True) == [[44, 44]] * 2
