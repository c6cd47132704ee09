"""Ops over lists do to each element what the plain op does, or are refused as a whole."""

from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)

listed: Any = torch  # torch does not export these ops to type checkers


def two(types: Any) -> list[Tensor]:
    return [assert_type(torch.ones(2, 2), {"a": t}) for t in types]


def test_a_refused_list_changes_nothing() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        fresh, whole, piece = torch.ones(2, 2), *two([R, S(0)])
        with pytest.raises(PlacementError, match="_foreach_add_"):
            listed._foreach_add_([fresh, whole], [whole, piece])
        assert torch.equal(fresh, torch.ones(2, 2)) and torch.equal(whole, fresh)
        assert_type(fresh, {"a": V})  # it still holds one number, and may be declared


# Each element by the row of the plain op: (list op, types of the operands, the result).
ELEMENTS: dict[str, tuple[Any, Any]] = {
    "add of lists": (lambda x, y: listed._foreach_add([x, y], [x, y]), [R, P]),
    "add of a number": (lambda x, y: listed._foreach_add([x, y], 1.0), [R, None]),
    "add of numbers": (lambda x, y: listed._foreach_add([x, y], [1.0, 0.0]), [R, P]),
    "add of one tensor": (lambda x, y: listed._foreach_add([x], x[0, 0]), [R]),
    "mul of a number": (lambda x, y: listed._foreach_mul([x, y], 2.0), [R, P]),
    "mul of lists": (lambda x, y: listed._foreach_mul([x, y], [x, x]), [R, P]),
    "square root": (lambda x, y: listed._foreach_sqrt([x]), [R]),
    "square root of a sum": (lambda x, y: listed._foreach_sqrt([x, y]), [R, None]),
    "quotient": (lambda x, y: listed._foreach_div([y], [x]), [P]),
    "quotient by a sum": (lambda x, y: listed._foreach_div([x], [y]), [None]),
    "addcdiv": (lambda x, y: listed._foreach_addcdiv([x], [x], [x], value=2.0), [R]),
    "addcdiv with numbers": (
        lambda x, y: listed._foreach_addcdiv([x], [x], [x], [2.0]),
        [R],
    ),
    "addcmul of a sum": (lambda x, y: listed._foreach_addcmul([x], [y], [y]), [None]),
    "lerp": (lambda x, y: listed._foreach_lerp([x, y], [x, y], 0.5), [R, P]),
    "lerp of both": (lambda x, y: listed._foreach_lerp([x, y], [y, x], 0.5), [None, None]),
    "power of a number": (lambda x, y: listed._foreach_pow(2.0, [x]), [R]),
    "maximum": (lambda x, y: listed._foreach_maximum([x], [x]), [R]),
    "clamp": (lambda x, y: listed._foreach_clamp_min([x], 0.0), [R]),
    "clamp of a sum": (lambda x, y: listed._foreach_clamp_min([y], 0.0), [None]),
    "norm": (lambda x, y: listed._foreach_norm([x]), [R]),
    "norm of a sum": (lambda x, y: listed._foreach_norm([y]), [None]),
    "numbers in a tensor": (
        lambda x, y: listed._foreach_addcdiv([x, x], [x, x], [x, x], torch.ones(2)),
        [None],
    ),
    "no plain op": (lambda x, y: listed._foreach_powsum([x]), [None]),
}


@pytest.mark.parametrize("case", ELEMENTS)
def test_each_element_of_a_list(case: str) -> None:
    run, expected = ELEMENTS[case]
    with set_current_mesh({"a": 2}), typecheck():
        x, y = two([R, P])
        if None in expected:
            with pytest.raises(PlacementError):
                run(x, y)
        else:
            assert [type_of(t) for t in run(x, y)] == [{"a": t} for t in expected]


def test_a_list_op_without_a_plain_one_is_told_nothing_false() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        with pytest.raises(PlacementError, match="like=<that op>"):
            listed._foreach_powsum(two([R]))


def fused(**given: list[Tensor]) -> None:
    kept = [torch.zeros(2, 2)]
    lists = {"grads": two([R]), "exp_avgs": kept, "exp_avg_sqs": [torch.zeros(2, 2)]}
    steps = given.pop("state_steps", [torch.tensor(1.0)])
    params, grads, averages, squares = {"params": two([R]), **lists, **given}.values()
    listed._fused_adamw_(
        params, grads, averages, squares, [], steps, lr=0.1, beta1=0.9, beta2=0.99,
        weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip
    assert [type_of(t) for t in (*params, *averages, *squares)] == [{"a": R}] * 3


WRONG = {
    "a Partial gradient": {"grads": [P]},
    "a gradient that is a piece": {"grads": [S(0)]},
    "state of another type": {"exp_avgs": [S(0)]},
    "state that differs by rank": {"exp_avg_sqs": [V]},
}


@pytest.mark.parametrize("wrong", [None, *WRONG])
def test_a_fused_step_wants_one_type(wrong: str | None) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        if wrong is None:
            fused()
            return
        given = {slot: two(types) for slot, types in WRONG[wrong].items()}
        with pytest.raises(PlacementError, match="_fused_adamw_"):
            fused(**given)


def test_a_fused_step_wants_numbers_that_are_equal() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        steps = [assert_type(torch.tensor(1.0), {"a": V})]
        with pytest.raises(PlacementError, match="state_steps is Varying"):
            fused(state_steps=steps)
