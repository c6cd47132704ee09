"""Gradients that hooks and assignments reduce: recognised, or refused with the truth.

Rank r has the gradient 10**r, so a sum over two ranks is 11, and one done twice is 22.
"""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from placements import (
    I,
    P,
    R,
    S,
    all_reduce,
    assert_type,
    clip_grad_norm_,
    convert,
    gradient_axes,
    reduce_gradients,
    set_current_mesh,
    type_of,
    typecheck,
    verify,
)
from placements.runtime import gradient_watch
from placements.runtime.gradient_notes import note_of
from placements.testing import RankFailure, device_mesh, run_ranks
from tests.support.reduced_gradients import (
    Do,
    Scale,
    a_post_hook,
    accumulate_node,
    an_assignment,
    backward,
    outcome,
    sum_dp,
)


def a_hook(m: Scale, backward: Any) -> None:
    m.w.register_hook(sum_dp)
    backward()


def a_hook_that_divides_first(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: sum_dp(g / 2))
    backward()


def a_hook_to_invariant(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: all_reduce(g, "dp", src=P, dst=I))
    backward()


def two_hooks(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: g * 2)
    m.w.register_hook(sum_dp)
    backward()


def every_backward(m: Scale, backward: Any) -> None:
    m.w.register_hook(sum_dp)
    backward()
    backward()


def every_step(m: Scale, backward: Any) -> None:
    a_hook(m, backward)
    m.w.grad = None
    backward()


def one_graph_twice(m: Scale, backward: Any) -> None:
    m.w.register_hook(sum_dp)
    backward(times=2)


def zeroed_in_place(m: Scale, backward: Any) -> None:
    a_hook(m, backward)
    assert m.w.grad is not None
    m.w.grad.zero_()
    backward()


def scaled_afterwards(m: Scale, backward: Any) -> None:
    a_hook(m, backward)
    assert m.w.grad is not None
    with torch.no_grad():
        m.w.grad.mul_(2)


def a_hook_that_looks(m: Scale, backward: Any) -> None:
    m.w.register_hook(look)
    backward()


def look(g: Tensor) -> None:
    assert sum_dp(g).tolist() == [11, 11]
    assert all_reduce(g.sum(), "dp", src=P, dst=R) == 22


def a_post_hook_that_divides_first(m: Scale, backward: Any) -> None:
    def assign(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = sum_dp(p.grad / 2)

    m.w.register_post_accumulate_grad_hook(assign)
    for _ in range(2):
        m.w.grad = None
        backward()


def a_hook_of_a_flat_view(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: sum_dp(g.flatten()).view_as(g))
    backward()


def a_hook_of_a_row(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: sum_dp(g[None])[0])
    backward()


def a_hook_of_the_node(m: Scale, backward: Any) -> None:
    node = accumulate_node(m)
    node.register_prehook(lambda gs: (sum_dp(gs[0]),))
    backward()


def with_create_graph(m: Scale, backward: Any) -> None:
    m.w.register_hook(sum_dp)
    x = torch.full((1, 2), 10.0 ** dist.get_rank(), dtype=torch.float64)
    m(assert_type(x, {"dp": S(0)})).square().sum().backward(create_graph=True)


def assigned_after_create_graph(m: Scale, backward: Any) -> None:
    x = torch.full((1, 2), 10.0 ** dist.get_rank(), dtype=torch.float64)
    m(assert_type(x, {"dp": S(0)})).square().sum().backward(create_graph=True)
    m.w.grad = sum_dp(m.w.grad)


def a_view_of_a_flat_sum(m: Scale, backward: Any) -> None:
    backward()
    assert m.w.grad is not None
    m.w.grad = sum_dp(m.w.grad.flatten()).view(2)


RECOGNISED: list[tuple[Do, float]] = [
    (a_hook_of_a_flat_view, 11),
    (a_hook_of_a_row, 11),
    (a_hook_of_the_node, 11),
    (with_create_graph, 202),
    (assigned_after_create_graph, 202),
    (a_view_of_a_flat_sum, 11),
    (a_hook, 11),
    (a_hook_that_divides_first, 5.5),
    (a_hook_to_invariant, 11),
    (two_hooks, 22),
    (every_backward, 22),
    (every_step, 11),
    (one_graph_twice, 22),
    (zeroed_in_place, 11),
    (scaled_afterwards, 22),
    (a_post_hook, 11),
    (a_post_hook_that_divides_first, 5.5),
    (an_assignment, 11),
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("then", ["clip", "reduce", "both"])
@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    ("do", "value"), RECOGNISED, ids=lambda v: getattr(v, "__name__", "")
)
def test_a_reduced_gradient_is_recognised(
    do: Do, value: float, checked: bool, then: str
) -> None:
    assert run_ranks({"dp": 2}, outcome, do, checked, then) == [value] * 2


def test_a_reduced_gradient_is_recognised_on_gloo() -> None:
    assert run_ranks({"dp": 2}, outcome, a_hook, True, "both", backend="gloo") == [11] * 2
    assert (
        run_ranks({"dp": 2}, outcome, every_backward, False, "both", backend="gloo")
        == [22] * 2
    )


@pytest.mark.parametrize("checked", [False, True])
def test_a_hook_that_only_looks_reduces_nothing(checked: bool) -> None:
    assert run_ranks({"dp": 2}, outcome, a_hook_that_looks, checked, "both") == [11] * 2
    for error in run_ranks({"dp": 2}, outcome, a_hook_that_looks, checked, "clip"):
        assert (error.expected, error.actual) == ("Replicate", "Partial")


def logs_of_magnitudes(m: Scale, backward: Any) -> None:
    log: list[Tensor] = []
    m.w.register_hook(lambda g: log.append(sum_dp(g.abs())))
    m.w.register_hook(lambda g: log.append(sum_dp(g.norm())))
    backward()
    assert len(log) == 2


def a_post_hook_that_looks(m: Scale, backward: Any) -> None:
    log: list[Tensor] = []

    def look_at(p: Tensor) -> None:
        assert p.grad is not None
        log.append(sum_dp(p.grad))
        log.append(sum_dp(p.grad.abs()))

    m.w.register_post_accumulate_grad_hook(look_at)
    backward()
    assert len(log) == 2


def looks_in_two_passes(m: Scale, backward: Any) -> None:
    logs_of_magnitudes(m, backward)
    m.w.register_hook(look)
    m.w.grad = None
    backward()


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(
    "do", [logs_of_magnitudes, a_post_hook_that_looks, looks_in_two_passes]
)
def test_a_log_reduces_nothing(do: Do, checked: bool) -> None:
    assert run_ranks({"dp": 2}, outcome, do, checked, "both") == [11] * 2
    for error in run_ranks({"dp": 2}, outcome, do, checked, "clip"):
        assert (error.expected, error.actual) == ("Replicate", "Partial")
        assert "if nothing has summed it, reduce_gradients(module) first" in str(error)


def logs_of_one_number(checked: bool) -> Any:
    """The norm of one number has its shape."""
    scale, log = Scale({"dp": R}), list[Tensor]()
    scale.w = nn.Parameter(torch.ones((), dtype=torch.float64))
    scale.w.register_hook(lambda g: log.append(sum_dp(g.norm())))
    with set_current_mesh(device_mesh()), typecheck() if checked else nullcontext():
        for _ in range(2):
            x = torch.full((1,), 10.0 ** dist.get_rank(), dtype=torch.float64)
            scale(assert_type(x, {"dp": S(0)})).sum().backward()
        reduce_gradients(scale)
    assert scale.w.grad is not None
    return scale.w.grad.item()


@pytest.mark.parametrize("checked", [False, True])
def test_a_log_of_one_number_reduces_nothing(checked: bool) -> None:
    assert run_ranks({"dp": 2}, logs_of_one_number, checked) == [22] * 2


def zeroed_and_reduced_again(checked: bool, how: str) -> Any:
    scale = Scale({"dp": R})
    found: list[float] = []
    buffer = torch.zeros(2, dtype=torch.float64)

    def move_over(p: Tensor) -> None:
        assert p.grad is not None
        buffer.add_(p.grad)
        p.grad = None

    if how == "main_grad":
        scale.w.register_post_accumulate_grad_hook(move_over)
    for _ in range(3):
        with set_current_mesh(device_mesh()), typecheck() if checked else nullcontext():
            if how == "zeroed":
                scale.zero_grad(set_to_none=False)
            else:
                buffer.zero_()
                scale.w.grad = None
            backward(scale, {"dp": S(0)})
        with set_current_mesh(device_mesh()):
            if how == "main_grad":
                scale.w.grad = buffer
            reduce_gradients(scale)
            assert scale.w.grad is not None
            clip_grad_norm_(scale, 1.0 if how == "zeroed" else 1e9)
            found.append(round(scale.w.grad[0].item(), 3))
    return found


@pytest.mark.parametrize(
    ("how", "checked"), [("zeroed", False), ("zeroed", True), ("main_grad", False)]
)
def test_a_buffer_that_is_zeroed_starts_anew(how: str, checked: bool) -> None:
    value = 0.707 if how == "zeroed" else 11
    assert run_ranks({"dp": 2}, zeroed_and_reduced_again, checked, how) == [[value] * 3] * 2


def types_in_and_after_a_hook() -> list[Any]:
    found: list[Any] = []
    scale = Scale({"dp": R})
    with set_current_mesh(device_mesh()), typecheck():
        scale.w.register_hook(sum_dp)
        backward(scale, {"dp": S(0)})
        assert scale.w.grad is not None
        found.append(type_of(scale.w.grad) == {"dp": R})
        found.append(gradient_axes(scale))
    return found


def test_the_result_of_a_hook_has_its_type() -> None:
    assert run_ranks({"dp": 2}, types_in_and_after_a_hook) == [[True, {"w": ("dp",)}]] * 2


def asked_of_autograd(hook: Any) -> Any:
    scale = Scale({"dp": R})
    scale.w.register_hook(hook)
    with set_current_mesh(device_mesh()), typecheck():
        x = torch.full((1, 2), 10.0 ** dist.get_rank(), dtype=torch.float64)
        loss = scale(assert_type(x, {"dp": S(0)})).sum()
        (g,) = torch.autograd.grad(loss, scale.w)
        found = type_of(g)["dp"]
    return found, g[0].item()


def test_autograd_grad_types_what_hooks_give() -> None:
    assert run_ranks({"dp": 2}, asked_of_autograd, sum_dp) == [(R, 11)] * 2
    log = lambda g: None if sum_dp(g.abs()) is not None else g  # noqa: E731
    assert run_ranks({"dp": 2}, asked_of_autograd, log) == [(P, 1), (P, 10)]
    with pytest.raises(RankFailure, match="returned another tensor than the result"):
        run_ranks({"dp": 2}, asked_of_autograd, lambda g: sum_dp(g) / 2)


def chained() -> int:
    x = torch.ones(2)
    with set_current_mesh(device_mesh()), torch.no_grad():
        for _ in range(50):
            x = all_reduce(convert(x, "dp", src=R, dst=P), "dp", src=P, dst=R)
    note = note_of(x)
    return 0 if note is None else len(note.steps)


def test_notes_do_not_grow() -> None:
    assert run_ranks({"dp": 2}, chained) == [1, 1]


def hooks_that_ran() -> list[int]:
    scale, ran = Scale({"dp": R}), list[int]()

    def look_on(g: Tensor) -> None:
        sum_dp(g)

    with set_current_mesh(device_mesh()), typecheck():
        x = torch.ones(1, 2, dtype=torch.float64)
        h = scale(assert_type(x, {"dp": S(0)}))
        h.register_hook(look_on)
        loss = h.sum()
        for _ in range(4):
            before = refusals.calls
            loss.backward(retain_graph=True)
            ran.append(refusals.calls - before)
    return ran


class Refusals(threading.local):
    """How often the hook that refuses a change was called, in this thread."""

    calls = 0


refusals = Refusals()


def test_hooks_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(grad: Tensor | None) -> None:
        refusals.calls += 1

    monkeypatch.setattr(gradient_watch, "_refuse_change", counted)
    assert run_ranks({"dp": 2}, hooks_that_ran) == [[1, 1, 1, 1]] * 2


def in_the_backward_of_a_function() -> Any:
    """The way into a region: its backward sums, and a leaf may take over the result."""

    class Enter(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return all_reduce(grads[0], "dp", src=P, dst=I)

    scale = Scale({"dp": I})
    with set_current_mesh(device_mesh()):
        w: Any = Enter.apply(scale.w)
        (w * 10.0 ** dist.get_rank()).sum().backward()
        reduce_gradients(scale)
        clip_grad_norm_(scale, 1e9)
    assert scale.w.grad is not None
    return scale.w.grad[0].item()


def test_a_sum_in_the_backward_of_a_function_is_none_of_the_leaf() -> None:
    assert run_ranks({"dp": 2}, in_the_backward_of_a_function) == [11] * 2


def verified() -> Any:
    scale = Scale({"dp": R})
    with set_current_mesh(device_mesh()), verify():
        scale.w.register_hook(sum_dp)
        backward(scale, {"dp": S(0)})
        reduce_gradients(scale)
    assert scale.w.grad is not None
    return scale.w.grad.tolist()


def test_verify_runs_with_hooks_that_reduce() -> None:
    assert run_ranks({"dp": 2}, verified) == [[11, 11]] * 2
