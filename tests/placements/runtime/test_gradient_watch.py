"""Gradients that hooks and assignments reduce: recognised, or refused with the truth.

Rank r has the gradient 10**r, so a sum over two ranks is 11, and one done twice is 22.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    clip_grad_norm_,
    convert,
    declare,
    gradient_axes,
    reduce_gradients,
    reinterpret_mesh,
    set_current_mesh,
    type_of,
    typecheck,
    verify,
)
from placements._torch import unseen
from placements.runtime import gradient_watch
from placements.runtime.gradient_notes import note_of
from placements.testing import RankFailure, device_mesh, run_ranks

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


def a_post_hook(m: Scale, backward: Any) -> None:
    def assign(p: Tensor) -> None:
        p.grad = sum_dp(p.grad)

    m.w.register_post_accumulate_grad_hook(assign)
    backward()


def a_post_hook_that_divides_first(m: Scale, backward: Any) -> None:
    def assign(p: Tensor) -> None:
        assert p.grad is not None
        p.grad = sum_dp(p.grad / 2)

    m.w.register_post_accumulate_grad_hook(assign)
    for _ in range(2):
        m.w.grad = None
        backward()


def an_assignment(m: Scale, backward: Any) -> None:
    backward()
    m.w.grad = sum_dp(m.w.grad)


def a_hook_of_a_flat_view(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: sum_dp(g.flatten()).view_as(g))
    backward()


def a_hook_of_a_row(m: Scale, backward: Any) -> None:
    m.w.register_hook(lambda g: sum_dp(g[None])[0])
    backward()


def accumulate_node(m: Scale) -> Any:
    with unseen():
        return torch.autograd.graph.get_gradient_edge(m.w).node


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


def partly_reduced(checked: bool) -> Any:
    scale = Scale({"dp": R, "tp": R})
    with set_current_mesh(device_mesh()), typecheck() if checked else nullcontext():
        scale.w.register_hook(sum_dp)
        backward(scale, {"dp": S(0), "tp": S(0)})
        try:
            clip_grad_norm_(scale, 1e9)
        except PlacementError as error:
            assert (error.axis, error.actual) == ("tp", "Partial")
        reduce_gradients(scale)
        clip_grad_norm_(scale, 1e9)
    assert scale.w.grad is not None
    return scale.w.grad.tolist()


@pytest.mark.parametrize("checked", [False, True])
def test_axes_that_are_left_are_summed(checked: bool) -> None:
    ranks = run_ranks({"dp": 2, "tp": 2}, partly_reduced, checked)
    assert ranks == [[1111, 1111]] * 4


def assigned(m: Scale, axes: tuple[str, ...]) -> None:
    for axis in axes:
        assert m.w.grad is not None
        m.w.grad = all_reduce(m.w.grad, axis, src=P, dst=R)


def looked_at(m: Scale, axes: tuple[str, ...]) -> None:
    assert m.w.grad is not None
    for axis in axes:
        all_reduce(m.w.grad, axis, src=P, dst=R)


def then_reduced(do: Any, axes: tuple[str, ...], checked: bool) -> Any:
    scale = Scale({"dp": R, "tp": R})
    with set_current_mesh(device_mesh()), typecheck() if checked else nullcontext():
        backward(scale, {"dp": S(0), "tp": S(0)})
        do(scale, axes)
        reduce_gradients(scale)
        assert scale.w.grad is not None
        if checked:
            assert type_of(scale.w.grad) == {"dp": R, "tp": R}
        found = scale.w.grad.tolist()
        if do is looked_at or len(axes) < 2:
            with pytest.raises(PlacementError, match="was reduced already"):
                reduce_gradients(scale)
        clip_grad_norm_(scale, 1e9)
        return found


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("axes", [("dp",), ("tp",), ("dp", "tp")])
@pytest.mark.parametrize("do", [assigned, looked_at])
def test_what_is_left_is_reduced_once(
    do: Any, axes: tuple[str, ...], checked: bool
) -> None:
    ranks = run_ranks({"dp": 2, "tp": 2}, then_reduced, do, axes, checked)
    assert ranks == [[1111, 1111]] * 4


def on_another_mesh(
    sparse_sizes: dict[str, int], axes: tuple[str, ...], checked: bool, how: str
) -> Any:
    """An expert's parameter lives on the sparse mesh; its gradient is summed on the dense."""
    dense, sparse = device_mesh(), device_mesh(sparse_sizes)
    types = {"edp": R, "ep": S(0)}
    scale = Scale({axis: types[axis] for axis in sparse_sizes})
    inputs = {"edp": S(0), "ep": S(1)}
    with typecheck() if checked else nullcontext():

        def summed(g: Tensor) -> Tensor:
            if checked and how == "assign":
                g = reinterpret_mesh(g, dense)
            with set_current_mesh(dense):
                for axis in axes:
                    g = all_reduce(g, axis, src=P, dst=R)
            return g

        try:
            with set_current_mesh(sparse):
                if how == "hook":
                    scale.w.register_hook(summed)
                backward(scale, {axis: inputs[axis] for axis in sparse_sizes})
                if how == "assign":
                    assert scale.w.grad is not None
                    scale.w.grad = summed(scale.w.grad)
            with set_current_mesh(dense):
                clip_grad_norm_(scale, 1e9, meshes=(dense, sparse))
                reduce_gradients(scale, meshes=(dense, sparse))
        except PlacementError as error:
            return str(error)
    assert scale.w.grad is not None
    return scale.w.grad.tolist()[0]


@pytest.mark.parametrize("how", ["hook", "assign"])
@pytest.mark.parametrize("checked", [False, True])
def test_a_sum_on_another_presentation_is_recognised(checked: bool, how: str) -> None:
    dense = {"dp": 2, "tp": 2}
    sums = run_ranks(dense, on_another_mesh, {"edp": 2, "ep": 2}, ("dp",), checked, how)
    assert sums == [101, 1010, 101, 1010]
    sums = run_ranks(dense, on_another_mesh, {"edp": 4}, ("dp", "tp"), checked, how)
    assert sums == [1111] * 4


@pytest.mark.parametrize("how", ["hook", "assign"])
@pytest.mark.parametrize("checked", [False, True])
def test_a_sum_over_other_ranks_is_refused(checked: bool, how: str) -> None:
    dense = {"dp": 2, "tp": 2}
    found = run_ranks(dense, on_another_mesh, {"edp": 4}, ("dp",), checked, how)
    for text in found:
        assert "covers only a part" in text or "two things at once" in text
        assert "reduce_gradients(module) first" not in text
    # tp has the ranks of ep, which hold experts of their own.
    found = run_ranks(dense, on_another_mesh, {"edp": 2, "ep": 2}, ("tp",), checked, how)
    for text in found:
        assert "Shard" in text or "S(0)" in text
        assert "reduce_gradients(module) first" not in text


def summed_twice_elsewhere(axes: tuple[str, ...]) -> Any:
    dense, sparse = device_mesh(), device_mesh({"edp": 2, "ep": 2})
    scale = Scale({"dp": R, "tp": R})
    with set_current_mesh(dense):
        backward(scale, {"dp": S(0), "tp": S(0)})
    assert scale.w.grad is not None
    g = scale.w.grad
    with set_current_mesh(sparse):
        for axis in axes:
            g = all_reduce(g, axis, src=P, dst=R)
    scale.w.grad = g
    with set_current_mesh(dense):
        reduce_gradients(scale)
        clip_grad_norm_(scale, 1e9)
        return g[0].item()


def test_a_sum_that_another_mesh_does_twice_is_refused() -> None:
    dense = {"dp": 2, "tp": 2}
    assert run_ranks(dense, summed_twice_elsewhere, ("edp", "ep")) == [1111] * 4
    for axes in (("edp", "edp", "ep"), ("edp", "ep", "ep"), ("ep", "edp", "ep", "ep")):
        with pytest.raises(RankFailure, match="took it for Partial, but it was Replicate"):
            run_ranks(dense, summed_twice_elsewhere, axes)


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


def in_the_group_of_an_axis() -> Any:
    dense, sparse = device_mesh(), device_mesh({"edp": 4})
    scale = Scale({"edp": R})
    scale.w.register_hook(lambda g: all_reduce(g, sparse.get_group("edp"), src=P, dst=R))
    with set_current_mesh(dense):
        backward(scale, {})
        clip_grad_norm_(scale, 1e9, meshes=(dense, sparse))
        assert scale.w.grad is not None
        return scale.w.grad.tolist()[0]


def test_a_sum_in_the_group_of_another_mesh_is_recognised() -> None:
    assert run_ranks({"dp": 2, "tp": 2}, in_the_group_of_an_axis) == [1111] * 4


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


def seeded_from_another_mesh(mesh: dict[str, int], types: Any) -> Any:
    dense = device_mesh()
    with typecheck():
        with set_current_mesh(device_mesh(mesh)):
            seed = assert_type(torch.ones(2, dtype=torch.float64), types)
        with set_current_mesh(dense):
            x = torch.ones(2, dtype=torch.float64, requires_grad=True)
            y = assert_type(x, {"dp": I, "tp": S(0)}) * 2
            try:
                y.backward(seed)
            except PlacementError as error:
                return error.headline
    assert x.grad is not None
    return x.grad.tolist()


def test_a_seed_of_another_mesh_is_taken_or_refused() -> None:
    dense = {"dp": 2, "tp": 2}
    same = {"a": 2, "b": 2}
    found = run_ranks(dense, seeded_from_another_mesh, same, {"a": I, "b": S(0)})
    assert found == [[2, 2]] * 4
    found = run_ranks(dense, seeded_from_another_mesh, same, {"a": R, "b": S(0)})
    assert all("seed is R on axis 'dp', expected I" in text for text in found)
    found = run_ranks(dense, seeded_from_another_mesh, {"a": 4}, {"a": R})
    assert all("expected" in text for text in found)


def one_mesh_for_meshes(given: Any) -> Any:
    mesh, scale = device_mesh(), Scale({"dp": R})
    with set_current_mesh(mesh):
        backward(scale, {"dp": S(0)})
    meshes = {"mesh": mesh, "sizes": {"dp": 2}}.get(given, given)
    axes = gradient_axes(scale, meshes=meshes)
    if given == "mesh":
        reduce_gradients(scale, meshes=meshes)
        clip_grad_norm_(scale, 1e9, meshes=meshes)
    return axes


@pytest.mark.parametrize("given", ["mesh", "sizes"])
def test_meshes_may_be_one_mesh(given: str) -> None:
    assert run_ranks({"dp": 2}, one_mesh_for_meshes, given) == [{"w": ("dp",)}] * 2


def test_meshes_that_are_no_meshes_are_refused() -> None:
    with pytest.raises(RankFailure, match="meshes= takes a mesh"):
        run_ranks({"dp": 2}, one_mesh_for_meshes, "dp")
    with pytest.raises(RankFailure, match="meshes= takes a mesh"):
        run_ranks({"dp": 2}, one_mesh_for_meshes, 3)
