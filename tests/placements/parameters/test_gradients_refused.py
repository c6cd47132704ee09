"""Gradients that cannot be reduced rightly are refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from placements import (
    PlacementError,
    R,
    S,
    clip_grad_norm_,
    reduce_gradients,
    set_current_mesh,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from tests.support.one_parameter import One, of_dtypes


def twice(between: str) -> str:
    mesh = device_mesh()
    one = One({"dp": R})
    with set_current_mesh(mesh):
        torch.autograd.backward(one.weight.sum())
        reduce_gradients(one)
        if between == "backward":
            torch.autograd.backward(one.weight.sum())
        elif between == "scale":
            assert one.weight.grad is not None
            one.weight.grad.mul_(0.5)
        elif between == "zero_grad":
            one.zero_grad()
            torch.autograd.backward(one.weight.sum())
        try:
            reduce_gradients(one)
        except PlacementError as error:
            assert error.name == "weight"
            return f"{error.expected}, got {error.actual}"
    assert one.weight.grad is not None
    assert one.weight.grad.tolist() == [2, 2]
    return "reduced"


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("nothing", "Partial, got Replicate"),
        ("scale", "Partial, got Replicate"),
        ("backward", "Partial, got Replicate plus Partial"),
        ("zero_grad", "reduced"),
    ],
)
def test_a_gradient_is_reduced_only_once(between: str, expected: str) -> None:
    assert run_ranks({"dp": 2}, twice, between) == [expected] * 2


def reduce_undeclared() -> None:
    with set_current_mesh(device_mesh()):
        reduce_gradients(nn.Sequential(One(None)))


def test_a_parameter_without_a_type_is_refused_by_name() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks({"dp": 2}, reduce_undeclared)
    assert isinstance(caught.value.cause, PlacementError)
    assert caught.value.cause.name == "0.weight"
    run_ranks({"dp": 1}, reduce_undeclared)
    reduce_gradients(One(None))


def reduce_without_mesh() -> None:
    reduce_gradients(One({"dp": R}))


def test_several_ranks_without_a_mesh_are_refused() -> None:
    with pytest.raises(RankFailure, match="no mesh is current"):
        run_ranks({"dp": 2}, reduce_without_mesh)


def test_a_parameter_on_another_mesh_is_refused_by_name() -> None:
    with (
        set_current_mesh({"dp": 2}),
        pytest.raises(ValueError, match=r"'weight' .* meshes=\(dense, sparse\)"),
    ):
        reduce_gradients(One({"ep": S(0)}))


def reduced_after_an_error() -> list[Any]:
    module = of_dtypes(torch.float32, torch.complex64)
    with set_current_mesh(device_mesh()):
        with pytest.raises(ValueError, match=r"float32 cannot hold what torch.complex64"):
            reduce_gradients(module, op_dtype=torch.float32)
        reduce_gradients(module)
    return [p.grad[0].item() for p in module.parameters() if p.grad is not None]


def test_what_is_refused_is_refused_before_the_first_sum() -> None:
    assert run_ranks({"dp": 2}, reduced_after_an_error) == [[11, 11]] * 2


def missing_on_one_rank(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> Any:
    module = of_dtypes(dtype)
    (p,) = module.parameters()
    p.grad = None
    p.grad_dtype = grad_dtype
    if torch.distributed.get_rank() == 0:
        p.grad = torch.full((2,), 1 + 2**-10, dtype=grad_dtype or torch.float32)
    with set_current_mesh(device_mesh()):
        reduce_gradients(module)
    assert p.grad is not None
    return p.grad.dtype, p.grad[0].item()


def test_a_gradient_that_one_rank_lacks() -> None:
    fine = 1 + 2**-10
    found = run_ranks({"dp": 2}, missing_on_one_rank, torch.complex64, torch.complex64)
    assert found == [(torch.complex64, fine)] * 2
    found = run_ranks({"dp": 2}, missing_on_one_rank, torch.bfloat16, None)
    assert found == [(torch.float32, fine)] * 2


def frozen(call: Any, reduced: bool) -> None:
    module = of_dtypes(torch.float64)
    with set_current_mesh(device_mesh()):
        if reduced:
            reduce_gradients(module)
        module.requires_grad_(False)
        call(module)


@pytest.mark.parametrize("call", [reduce_gradients, partial(clip_grad_norm_, max_norm=1.0)])
def test_a_frozen_parameter_with_a_gradient_is_named(call: Any) -> None:
    run_ranks({"dp": 2}, frozen, call, True)
    with pytest.raises(RankFailure, match=r"'w0', which is not trained is Partial"):
        run_ranks({"dp": 2}, frozen, call, False)
