"""verify() names the first value that is not what its type says."""

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
    V,
    all_gather,
    all_reduce,
    assert_type,
    declare,
    global_state_dict,
    load_global_state_dict,
    region,
    reinterpret,
    set_current_mesh,
    verify,
)
from placements.testing import device_mesh, run_ranks
from placements.types.extents import Padded
from tests.support.verified import AXES, D, built, caught, found, step


def missing_copy() -> None:
    """Each rank drew its own weights; nobody made them equal."""
    torch.manual_seed(dist.get_rank())
    first = assert_type(torch.ones(3), {"dp": R, "tp": R})
    weight = torch.randn(3)
    assert_type(weight, {"dp": R, "tp": R})
    assert_type(first + weight, {"dp": R, "tp": R})


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_replicas_that_differ(backend: Any) -> None:
    error = found(missing_copy, backend)
    assert error.name == "weight" and error.axis == "dp"
    assert error.where.startswith("assert_type at test_mode_lies.py:")
    assert "ranks 0 and 2" in error.actual and "Replicate" in error.expected


def drifted() -> None:
    """One rank's bias is another: as after a step whose gradients were not reduced."""
    mlp = built()
    bias_D = torch.full((D,), 1.0 if dist.get_rank() == 3 else 0.99)
    load_global_state_dict(mlp, global_state_dict(mlp) | {"bias_D": bias_D})
    step(mlp)


def test_parameters_that_drifted_apart() -> None:
    error = found(drifted)
    assert error.name == "bias_D" and error.where.startswith("Mlp at")
    assert "ranks 2 and 3" in error.actual or "ranks 1 and 3" in error.actual


def forgotten_reduction_in_opaque_code() -> None:
    """The region claims Replicate, but returns this rank's summand; a list hides the rank."""
    opaque = region(
        lambda h: h * [1, 2, 1, 2][dist.get_rank()],
        ins=[{"dp": R, "tp": R}],
        outs={"dp": R, "tp": R},
        grads=[{"dp": P, "tp": P}],
    )
    opaque(assert_type(torch.ones(2), {"dp": R, "tp": R}))


class _Lying(torch.autograd.Function):
    """Says Invariant -> Invariant, but uses the value differently on each rank."""

    @staticmethod
    def placement_rule(x: Any) -> Any:
        return x

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (dist.get_rank() % 2 + 1)


def wrong_backward() -> None:
    x = assert_type(torch.ones(2, requires_grad=True), {"dp": I, "tp": I})
    y: Tensor = _Lying.apply(x)  # type: ignore[assignment]
    torch.autograd.backward(assert_type(y, {"dp": I, "tp": I}).sum())


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_gradient_that_is_not_what_its_type_says(backend: Any) -> None:
    error = found(wrong_backward, backend)
    assert error.name == "x" and error.axis == "tp"
    assert "Invariant" in error.expected and "ranks 0 and 1" in error.actual
    assert "convert(x, 'tp', src=I, dst=R)" in error.advice


def wrong_backward_of_a_summand() -> None:
    x = assert_type(torch.ones(2, requires_grad=True), {"dp": I, "tp": P})
    y: Tensor = _Lying.apply(x)  # type: ignore[assignment]
    torch.autograd.backward(all_reduce(y.sum(), "tp", src=P, dst=I))


def test_the_gradient_of_a_partial_is_replicate() -> None:
    error = found(wrong_backward_of_a_summand)
    assert (error.name, error.axis) == ("x", "tp") and "Replicate" in error.expected


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_forgotten_reduction(backend: Any) -> None:
    error = found(forgotten_reduction_in_opaque_code, backend)
    assert (error.name, error.axis) == ("result", "tp")
    assert error.where.startswith("region at") and "Replicate" in error.expected


def uneven_rows() -> None:
    rows = 3 - dist.get_rank() % 2
    x = torch.zeros(rows, 2)
    assert_type(x, {"dp": I, "tp": S(0)})


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_extents_that_ranks_do_not_agree_on(backend: Any) -> None:
    error = found(uneven_rows, backend)
    assert (error.name, error.axis) == ("x", "tp")
    assert error.expected == "pieces of (3, 2) rows" and "Ragged(3, 2)" in error.advice


def declared_uneven_rows() -> None:
    rows = 3 - dist.get_rank() % 2
    x = torch.zeros(rows, 2)
    types: dict[str, Any] = {"dp": I, "tp": S(0, Padded(5))}
    assert all_gather(assert_type(x, types), "tp", src=types["tp"], dst=R).shape[0] == 5


def test_extents_that_ranks_agree_on() -> None:
    assert run_ranks(AXES, caught, declared_uneven_rows)[0][0] == "nothing was found"


def doubly_cut_rows() -> None:
    rows = (2, 1, 1, 1)[dist.get_rank()]
    assert_type(torch.zeros(rows), {"dp": S(0, Padded(5)), "tp": S(0)})


def test_extents_of_a_dim_that_two_axes_cut() -> None:
    assert run_ranks(AXES, caught, doubly_cut_rows)[0][0] == "nothing was found"


class Experts(nn.Module):
    """On a rank without tokens only the first expert takes part (B56)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.ones(2))
        types = {"dp": V, "tp": S(0)}
        declare(self, {"first": types, "second": types})

    def forward(self) -> Tensor:
        y = self.first * 2
        return y if dist.get_rank() == 1 else y + self.second


def skipped_parameter() -> None:
    experts = Experts()
    torch.autograd.backward(reinterpret(experts().sum(), "dp", src=V, dst=P))


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_parameter_without_a_gradient(backend: Any) -> None:
    error = found(skipped_parameter, backend)
    assert error.name == "Experts.second" and error.actual == "None on rank 1"


def lies_twice() -> None:
    """The later lie is on the axis that comes first in the mesh."""
    rank = dist.get_rank()
    x = torch.full((2,), (rank % 2) * 1.0)
    assert_type(x, {"dp": R, "tp": R})
    y = torch.full((2,), rank * 1.0)
    assert_type(y, {"dp": R, "tp": R})


def notes() -> list[str]:
    with set_current_mesh(device_mesh()):
        try:
            with verify():
                lies_twice()
        except PlacementError as error:
            return [error.name, *error.__notes__]
    return []


def test_the_first_lie_in_program_order_is_named() -> None:
    name, note = run_ranks(AXES, notes)[0]
    assert name == "x" and ": y" in note
