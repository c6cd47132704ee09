"""The dot-product test finds a missing, a doubled and a misplaced reduction."""

from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import placements
from placements import (
    I,
    P,
    Padded,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    convert,
    reduce_scatter,
)
from placements.inference.transitions import TRANSITIONS, Transition
from placements.testing import check_adjoint
from placements.types.axis import BY_LETTER, AxisType

MESH = {"tp": 4}
X = torch.arange(6.0, dtype=torch.float64).reshape(2, 3) / 7
W = torch.arange(24.0, dtype=torch.float64).reshape(4, 3, 2).sin()  # one by rank


def right(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((convert(x, "tp", I, R) @ w).tanh(), "tp", P, I)


def no_copy(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).tanh(), "tp", P, I)


def reduced_for_use_by_rank(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((convert(x, "tp", I, R) @ w).tanh(), "tp", P, R)


def no_reduction(x: Tensor, w: Tensor) -> Tensor:
    return (convert(x, "tp", I, R) @ w).tanh()


def no_collective(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh()


def through_replicate(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).tanh(), "tp", P, R)


def through_invariant(x: Tensor, w: Tensor) -> Tensor:
    return all_reduce((x @ w).tanh(), "tp", P, I)


def reduced_twice(x: Tensor, w: Tensor) -> Tensor:
    y = convert(convert(x, "tp", I, R), "tp", I, R)
    return all_reduce((y @ w).tanh(), "tp", P, I)


# the table of measurements.md, section 3, and one more
PROGRAMS = [
    (right, I, I, None),
    (no_copy, I, I, "gradient of x is not the adjoint"),
    (reduced_for_use_by_rank, I, I, "gradient of x is not the adjoint"),
    (no_reduction, I, I, "result 0 is not {'tp': I}"),
    (no_collective, R, P, None),
    (through_replicate, R, R, None),
    (through_invariant, R, R, "gradient of x is not the adjoint"),
    (reduced_twice, I, I, "gradient of x is not the adjoint"),
]


@pytest.mark.parametrize(
    "program, src, dst, guilty", PROGRAMS, ids=lambda p: getattr(p, "__name__", "")
)
def test_programs_of_the_table(program, src, dst, guilty) -> None:
    inputs = {"x": (X, {"tp": src}), "w": (W, {"tp": V})}
    if guilty is None:
        check_adjoint(program, inputs, {"tp": dst}, mesh=MESH)
        return
    with pytest.raises(AssertionError, match=guilty):
        check_adjoint(program, inputs, {"tp": dst}, mesh=MESH)


def moved(row: Transition, src: AxisType, dst: AxisType, x: Tensor) -> Tensor:
    if row.action == "exchange":
        sizes = [1] * MESH["tp"]
        return all_to_all(x, "tp", V, V, input_split_sizes=sizes, output_split_sizes=sizes)
    call: Any = getattr(placements, row.call)
    return call(x, "tp", src=src, dst=dst)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda r: f"{r.call}-{r.src}-{r.dst}")
def test_every_collective_and_cast(row: Transition) -> None:
    """Four rows of four: one for each rank, where a transition unbinds them."""
    src = BY_LETTER.get(row.src, S(0))
    dst = BY_LETTER.get(row.dst, S(1) if row.action == "recut" else S(0))
    numel = 64 if row.src == "V" else 16  # of Varying values every rank's
    x = torch.arange(numel, dtype=torch.float64).sin().reshape(-1, 4, 4)
    inputs = {"x": (x if row.src == "V" else x[0], {"tp": src})}
    check_adjoint(partial(moved, row, src, dst), inputs, {"tp": dst}, mesh=MESH)


def test_uneven_pieces_and_two_inputs() -> None:
    x = torch.arange(10.0, dtype=torch.float64).reshape(5, 2) / 5
    w = torch.arange(4.0, dtype=torch.float64).reshape(2, 2).cos()
    rows = S(0, Padded(5))

    def fn(x: Tensor, w: Tensor) -> Tensor:
        whole = all_gather(x, "tp", rows, R)
        return reduce_scatter((whole @ w).tanh(), "tp", P, rows)

    check_adjoint(
        fn, {"x": (x, {"tp": rows}), "w": (w, {"tp": R})}, {"tp": rows}, mesh={"tp": 2}
    )


def test_the_guilty_input_is_named() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce(convert(x, "tp", I, R) @ w.detach(), "tp", P, I)

    with pytest.raises(AssertionError, match="gradient of w"):
        check_adjoint(fn, {"x": (X, {"tp": I}), "w": (W, {"tp": V})}, {"tp": I}, mesh=MESH)


class _Backward(torch.autograd.Function):
    """The identity, with any backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Any) -> Tensor:
        ctx.of = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.of(gradients[0].clone()), None


def with_backward(x: Tensor, backward: Any) -> Tensor:
    return cast(Tensor, _Backward.apply(x, backward))


def summed(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient


def whole_on_the_first_rank(gradient: Tensor) -> Tensor:
    return summed(gradient) * (2.0 if dist.get_rank() == 0 else 0.0)


TWO = {"tp": 2}
A = torch.arange(8.0, dtype=torch.float64).reshape(2, 4).cos()
B = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).sin()
COLUMNS = {"x": (A, {"tp": I}), "w": (B, {"tp": S(1)})}


def test_a_reduction_over_another_axis_of_equal_size_is_found() -> None:
    inputs = {"x": (A, {"dp": I, "tp": I}), "w": (B, {"dp": I, "tp": S(1)})}
    outs, mesh = {"dp": I, "tp": S(1)}, {"dp": 2, "tp": 2}

    def over(axis: str, x: Tensor, w: Tensor) -> Tensor:
        return convert(x, axis, I, R) @ w

    check_adjoint(partial(over, "tp"), inputs, outs, mesh=mesh)
    with pytest.raises(
        AssertionError, match=r"gradient of x .*'tp'.* ranks 0 and 1 it diff"
    ):
        check_adjoint(partial(over, "dp"), inputs, outs, mesh=mesh)


@pytest.mark.parametrize("backward", [lambda g: g * 2, whole_on_the_first_rank])
def test_a_gradient_that_is_right_in_the_sum_alone(backward) -> None:
    """The ranks' dot products add up to the right one, but no rank has the gradient."""
    check_adjoint(
        lambda x, w: with_backward(x, summed) @ w, COLUMNS, {"tp": S(1)}, mesh=TWO
    )
    with pytest.raises(
        AssertionError, match=r"gradient of x .*'tp'.* ranks 0 and 1 it diff"
    ):
        check_adjoint(
            lambda x, w: with_backward(x, backward) @ w, COLUMNS, {"tp": S(1)}, mesh=TWO
        )


def test_the_gradient_of_partial_is_replicate() -> None:
    with pytest.raises(AssertionError, match=r"must be equal.* gradient must be {'tp': R}"):
        check_adjoint(lambda x: x * x, {"x": (A, {"tp": P})}, {"tp": P}, mesh=TWO)


@pytest.mark.parametrize(
    "fn, what",
    [
        (lambda x: x * float("nan"), "result 0"),
        (lambda x: x / 0, "result 0"),
        (lambda x: torch.sqrt(x * 0), "the gradient of x"),
        (
            lambda x: x * (float("nan") if dist.get_rank() else 1),
            "result 0 is not finite on rank 1",
        ),
    ],
)
def test_what_is_not_finite_is_not_right(fn, what) -> None:
    with pytest.raises(AssertionError, match=what) as error:
        check_adjoint(fn, {"x": (A, {"tp": S(0)})}, {"tp": S(0)}, mesh=TWO)
    assert "not finite" in str(error.value)


@pytest.mark.parametrize("claim", [R, I])
def test_results_that_are_called_equal_must_be(claim) -> None:
    def by_rank(x: Tensor) -> Tensor:
        return x * (dist.get_rank() + 1)

    with pytest.raises(AssertionError, match=r"result 0 is not .*ranks 0 and 1"):
        check_adjoint(by_rank, {"x": (A, {"tp": claim})}, {"tp": claim}, mesh=TWO)
    with pytest.raises(AssertionError, match="change of result 0 with x is not"):
        check_adjoint(by_rank, {"x": (A * 0, {"tp": R})}, {"tp": claim}, mesh=TWO)
    rows = {"x": (A, {"tp": S(1)}), "w": (B, {"tp": S(0)})}
    with pytest.raises(AssertionError, match=r"result 0 is not .*ranks 0 and 1"):
        check_adjoint(lambda x, w: x @ w, rows, {"tp": claim}, mesh=TWO)
    with pytest.raises(AssertionError, match="shapes are"):
        check_adjoint(lambda x: x * 2, {"x": (B, {"tp": S(1)})}, {"tp": claim}, mesh=TWO)


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    "value, types, outs, said",
    [
        (A, {"tp": S(0)}, {"tp": S(7)}, "result 0 .*S\\(7\\) names a dim"),
        (A, {"tp": S(0)}, {"tp": S(0, Padded(5))}, "result 0 .*Its shapes by rank"),
        (B, {"tp": S(1)}, {"tp": S(0)}, "result 0 .*Its shapes by rank"),
        (A, {"tp": R}, {}, "result 0 must name the axes"),
        (A, {"tp": R}, {"tp": R, "zz": R}, "result 0 must name the axes"),
        (A, {"tp": R}, [{"tp": R}, {"tp": R}], "returned 1 tensors, .* types of 2"),
        (A, {"tp": R}, None, "outs must be the types"),
        (A, {"tp": R}, [], "outs must be the types"),
        (A, {"tp": R}, {"tp": 3}, "types of result 0: a placement is"),
        (A, {}, {"tp": R}, "input x must name the axes"),
        (A, {"tp": R, "zz": R}, {"tp": R}, "input x must name the axes"),
        (A, {"tp": S(2)}, {"tp": R}, "input x: S\\(2\\) names a dim"),
        (A, {"tp": S(1, Padded(5))}, {"tp": R}, "input x: .*cuts 5 rows"),
        (B[:3], {"tp": V}, {"tp": V}, "input x .*first dims must be \\[2\\]"),
        (A.float(), {"tp": R}, {"tp": R}, "input x is torch.float32, must be float64"),
        (3.0, {"tp": R}, {"tp": R}, "input x must be a pair"),
        (A, None, {"tp": R}, "types of input x must be a mapping"),
    ],
)
def test_what_does_not_fit_is_refused(value, types, outs, said) -> None:
    with pytest.raises(ValueError, match=said):
        check_adjoint(doubled, {"x": (value, types)}, outs, mesh=TWO)


@pytest.mark.parametrize(
    "inputs, mesh, said",
    [
        ({"x": (A, {"tp": R})}, 2, "mesh must be the size of each axis"),
        ({"x": A}, TWO, "input x must be a pair .*got Tensor"),
        ({}, TWO, "at least one input"),
        ({"y": (A, {"tp": R})}, TWO, "takes .x: .*the inputs are .'y'."),
    ],
)
def test_bad_arguments_are_refused(inputs, mesh, said) -> None:
    with pytest.raises(ValueError, match=said):
        check_adjoint(doubled, inputs, {"tp": R}, mesh=mesh)


@pytest.mark.parametrize(
    "fn, said",
    [
        (lambda x: None, "returned NoneType"),
        (lambda x: {"y": x}, "returned dict"),
        (lambda x: (x, [x]), "returned tuple of .Tensor, list."),
        (lambda x: x.argmax(0), "result 0 is torch.int64"),
        (lambda x: x.float(), "result 0 is torch.float32, must be float64"),
        (torch.tanh, "cannot be read"),
    ],
)
def test_results_without_a_gradient_are_refused(fn, said) -> None:
    with pytest.raises(ValueError, match=said):
        check_adjoint(fn, {"x": (A, {"tp": R})}, {"tp": R}, mesh=TWO)


def test_axes_of_one_rank_may_be_left_out() -> None:
    inputs = {"x": (A, {"tp": P})}
    check_adjoint(doubled, inputs, {"tp": P, "dp": R}, mesh={"dp": 1, "tp": 2})


def test_varying_results_have_any_shapes() -> None:
    inputs = {"x": (A[:, :3], {"dp": V, "tp": S(0)})}
    check_adjoint(
        lambda x: x[: dist.get_rank() // 2 + 1], inputs, {"dp": V, "tp": S(0)},
        mesh={"dp": 2, "tp": 2},
    )  # fmt: skip


def test_inputs_go_by_name() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        return a * 2 + b.detach()

    a, b = (A, {"tp": R}), (A + 1, {"tp": R})
    for inputs in ({"a": a, "b": b}, {"b": b, "a": a}):
        with pytest.raises(AssertionError, match="gradient of b"):
            check_adjoint(fn, inputs, {"tp": R}, mesh=TWO)
    check_adjoint(lambda *, a: a * 2, {"a": a}, {"tp": R}, mesh=TWO)
    check_adjoint(lambda a, /: a * 2, {"a": a}, {"tp": R}, mesh=TWO)
    check_adjoint(lambda *args: args[0] * 2, {"a": a}, {"tp": R}, mesh=TWO)
    check_adjoint(lambda a, *more: a * more[0], {"a": a, "b": b}, {"tp": R}, mesh=TWO)
    with pytest.raises(ValueError, match=r"fn takes .a, .more., but the inputs are"):
        check_adjoint(lambda a, *more: a, {"b": b, "a": a}, {"tp": R}, mesh=TWO)


def test_inputs_may_require_gradients() -> None:
    x = A.clone().requires_grad_()
    for value in (x, x * 2):
        check_adjoint(doubled, {"x": (value, {"tp": R})}, {"tp": R}, mesh=TWO)
    assert x.grad is None


def test_a_result_without_gradient_is_not_the_adjoint() -> None:
    with pytest.raises(AssertionError, match=r"gradient of x .* 0 times as much"):
        check_adjoint(lambda x: x.detach(), {"x": (A, {"tp": R})}, {"tp": R}, mesh=TWO)


@pytest.mark.parametrize("scale", [1e-100, 1e-10, 1e10])
def test_small_and_large_functions_are_judged_alike(scale) -> None:
    def once(x: Tensor, w: Tensor) -> Tensor:
        return (convert(x, "tp", I, R) @ w).tanh() * scale

    def twice(x: Tensor, w: Tensor) -> Tensor:
        return once(convert(x, "tp", I, R), w)

    check_adjoint(once, COLUMNS, {"tp": S(1)}, mesh=TWO)
    with pytest.raises(AssertionError, match=r"gradient of x .* 2 times as much"):
        check_adjoint(twice, COLUMNS, {"tp": S(1)}, mesh=TWO)


def test_rounding_is_no_error() -> None:
    """A sum of softmax is one, so its changes and gradients are rounding alone."""
    inputs = {"x": (A, {"tp": I})}
    check_adjoint(lambda x: x.softmax(1).sum(1) * 3, inputs, {"tp": I}, mesh=TWO)
    check_adjoint(lambda x: x * 1e-6 + 1e3, inputs, {"tp": I}, mesh=TWO)
