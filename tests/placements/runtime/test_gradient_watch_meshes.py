"""Gradients that are reduced on some axes, or on another mesh over the same ranks."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    clip_grad_norm_,
    reduce_gradients,
    reinterpret_mesh,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from tests.support.reduced_gradients import Scale, backward, sum_dp


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
