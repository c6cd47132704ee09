"""The norm counts every element once over the whole mesh, as on one device."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    clip_grad_norm_,
    declare,
    join,
    reduce_gradients,
    set_current_mesh,
    split,
    type_of,
    typecheck,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.extents import Padded

AXES = {"dp": 2, "tp": 2}
# Values of which some are pieces and some are equal; 5 rows over 2 ranks are 3 and 2.
TYPES: dict[str, Any] = {
    "sharded": {"dp": I, "tp": S(0)},
    "sharded_twice": {"dp": S(1), "tp": S(0)},
    "uneven": {"dp": I, "tp": S(0, Padded(5))},
    "equal": {"dp": I, "tp": I},
}
SHAPES = {"sharded": (4, 3), "sharded_twice": (2, 4), "uneven": (5,), "equal": (3,)}


def gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randint(-9, 10, shape, generator=generator).double()
        for name, shape in SHAPES.items()
    }


class Model(nn.Module):
    """Parameters of every kind, with this rank's piece of the gradients."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        mesh = device_mesh()
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        for name, grad in gradients().items():
            piece = split(grad, TYPES[name], sizes)[mesh.get_rank()].to(dtype)
            parameter = nn.Parameter(torch.zeros_like(piece))
            parameter.grad = piece
            self.register_parameter(name, parameter)
        declare(self, TYPES)


def clipped(
    max_norm: float, norm_type: float, checked: bool = False
) -> tuple[Tensor, list[Tensor]]:
    model = Model()
    with set_current_mesh(device_mesh()):
        if checked:
            with typecheck():
                norm = clip_grad_norm_(model, max_norm, norm_type)
                assert dict(type_of(norm) or {}) == {"dp": R, "tp": R}
        else:
            norm = clip_grad_norm_(model, max_norm, norm_type)
    return norm, [p.grad for p in model.parameters() if p.grad is not None]


def check(
    mesh: dict[str, int], ranks: list[Any], max_norm: float, norm_type: float
) -> None:
    reference = [nn.Parameter(torch.zeros(shape)).double() for shape in SHAPES.values()]
    reference = [nn.Parameter(p) for p in reference]
    for parameter, grad in zip(reference, gradients().values(), strict=True):
        parameter.grad = grad
    expected = torch.nn.utils.clip_grad_norm_(reference, max_norm, norm_type)
    assert len({norm.item() for norm, _ in ranks}) == 1, "all ranks get the same bits"
    torch.testing.assert_close(ranks[0][0], expected, rtol=1e-14, atol=0)
    for k, (name, types) in enumerate(TYPES.items()):
        found = join([grads[k] for _, grads in ranks], types, mesh)
        torch.testing.assert_close(
            found, reference[k].grad, rtol=1e-14, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("mesh", [AXES, {"dp": 1, "tp": 2}, {"dp": 1, "tp": 1}])
def test_norm_and_gradients_are_those_of_one_device(
    mesh: dict[str, int], max_norm: float, norm_type: float
) -> None:
    check(mesh, run_ranks(mesh, clipped, max_norm, norm_type), max_norm, norm_type)


def test_works_while_checking() -> None:
    check(AXES, run_ranks(AXES, clipped, 0.5, 2.0, True), 0.5, 2.0)


def test_norm_on_gloo() -> None:
    check(AXES, run_ranks(AXES, clipped, 0.5, 2.0, backend="gloo"), 0.5, 2.0)


def half_norm() -> float:
    with set_current_mesh(device_mesh()):
        return clip_grad_norm_(Model(torch.bfloat16), 1e9).item()


def test_half_precision_adds_up_in_float32() -> None:
    squares = sum((g**2).sum().item() for g in gradients().values())
    for norm in run_ranks(AXES, half_norm):
        assert norm == pytest.approx(math.sqrt(squares), rel=1e-6)


class One(nn.Module):
    def __init__(self, types: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        declare(self, {"weight": types})


def of_reduced(reduce: bool) -> float:
    mesh = device_mesh()
    one = One({"dp": R})
    with set_current_mesh(mesh):
        torch.autograd.backward((one.weight * torch.tensor([3.0, 4.0])).sum())
        if reduce:
            reduce_gradients(one)
        return clip_grad_norm_(one, 1.0).item()


def test_a_replicated_gradient_counts_once() -> None:
    # The sum over two ranks is [6, 8].
    assert run_ranks({"dp": 2}, of_reduced, True) == [10.0, 10.0]


def failure(fn: Callable[..., Any], *args: Any) -> BaseException | None:
    with pytest.raises(RankFailure) as caught:
        run_ranks({"dp": 2}, fn, *args)
    return caught.value.cause


def test_a_gradient_that_is_still_partial_is_refused() -> None:
    error = failure(of_reduced, False)
    assert isinstance(error, PlacementError)
    assert (error.axis, error.actual, error.expected) == ("dp", "Partial", "Replicate")
    assert "weight" in error.name and "reduce_gradients" in error.advice


def added_to_after_reduction() -> None:
    one = One({"dp": R})
    with set_current_mesh(device_mesh()):
        torch.autograd.backward(one.weight.sum())
        reduce_gradients(one)
        torch.autograd.backward(one.weight.sum())
        clip_grad_norm_(one, 1.0)


def test_a_gradient_that_was_added_to_after_reduction_is_refused() -> None:
    error = failure(added_to_after_reduction)
    assert isinstance(error, PlacementError)
    assert error.actual == "Replicate plus Partial"


def varying_and_missing() -> float:
    mesh = device_mesh()
    model = nn.ModuleList([One({"dp": V}), One({"dp": P}), One({"dp": S(0)})])
    with set_current_mesh(mesh):
        for parameter in model[:2].parameters():
            parameter.grad = torch.tensor([0.0, 2.0], dtype=torch.float64)
        if mesh.get_rank() == 1:
            model[2].weight.grad = torch.tensor([0.0, 2.0], dtype=torch.float64)
        return clip_grad_norm_(model, 1e9).item()


def test_unrelated_values_add_up_and_a_missing_gradient_is_zero() -> None:
    # Varying: 4 on each of 2 ranks; the gradient of a Partial: once; Shard: on one rank.
    assert run_ranks({"dp": 2}, varying_and_missing) == [4.0, 4.0]


def two_meshes() -> float:
    dense, sparse = device_mesh(), device_mesh({"edp": 2, "ep": 2})
    model = nn.ModuleDict(
        {"router": One({"dp": I, "tp": I}), "experts": One({"edp": I, "ep": S(0)})}
    )
    for parameter in model.parameters():
        parameter.grad = torch.tensor([2.0, 2.0], dtype=torch.float64)
    # 8 of the router once, 8 of the experts on each of 2 ep ranks.
    return clip_grad_norm_(model, 1e9, meshes=(dense, sparse)).item() ** 2


def test_parameters_on_two_meshes() -> None:
    assert run_ranks({"dp": 1, "tp": 4}, two_meshes) == pytest.approx([24.0] * 4)


def test_bad_norms_are_refused() -> None:
    one = One({"dp": I})
    with pytest.raises(ValueError, match="norm_type is 0"):
        clip_grad_norm_(one, 1.0, 0)
    one.weight.grad = torch.tensor([math.inf, 0.0], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="must be finite"):
        clip_grad_norm_(one, 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(nn.Module(), 1.0).item() == 0


def test_the_norm_of_complex128_is_float64() -> None:
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(2, dtype=torch.complex128))
    module.w.grad = torch.tensor([3.0 + 2**-40, 4.0j], dtype=torch.complex128)
    norm = clip_grad_norm_(module, 1e9)
    assert norm.dtype == torch.float64
    assert norm == torch.linalg.vector_norm(module.w.grad)
