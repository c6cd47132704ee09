"""verify() compares values across ranks once a step, and names the first lie."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    declare,
    ledger,
    set_current_mesh,
    type_of,
    verify,
)
from placements.testing import device_mesh, run_ranks
from tests.support.verified import AXES, built, caught, step, tokens


def clean() -> list[tuple[str, str]]:
    with set_current_mesh(device_mesh()):
        mlp = built()
        optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
        with ledger() as outer:
            for _ in range(3):
                with verify():
                    step(mlp)
                optimizer.step()
                optimizer.zero_grad()
        return [(entry.kind, entry.axis) for entry in outer.entries]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_right_program_passes(dp: int, tp: int) -> None:
    sent = run_ranks({"dp": dp, "tp": tp}, clean)
    # Nothing is sent over an axis of one rank, and all ranks send the same.
    assert {axis for _, axis in sent[0]} == {
        a for a, n in (("dp", dp), ("tp", tp)) if n > 1
    }
    assert all(rank == sent[0] for rank in sent)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_right_program_passes_and_records_what_it_sends(backend: Any) -> None:
    ranks = run_ranks(AXES, clean, backend=backend)
    # tp: forward, and the gradient of x; dp: total, count, gradients in two buckets.
    assert ranks[0].count(("all-reduce", "tp")) == 6
    assert ranks[0].count(("all-reduce", "dp")) == 3 * 3
    assert all(rank == ranks[0] for rank in ranks)


def hooks_left(block: Any) -> tuple[int, int]:
    with set_current_mesh(device_mesh()):
        mlp = built()
        with block():
            step(mlp)
        mlp.zero_grad()
        # Gradients do not reach the log of a block that has ended.
        step(mlp)
        left = mlp.w_in_HD._post_accumulate_grad_hooks or {}
        return len(left), len(mlp.bias_D._backward_hooks or {})


def test_no_hook_is_left_behind() -> None:
    # Those of reduce_gradients, which watches for additions to the reduced, are there anyway.
    assert run_ranks(AXES, hooks_left, verify) == run_ranks(AXES, hooks_left, nullcontext)


def unused_parameter() -> str:
    mlp = built()
    extra = nn.Parameter(torch.zeros(2))
    mlp.register_parameter("extra", extra)
    declare(mlp, {"extra": {"dp": R, "tp": I}})
    with set_current_mesh(device_mesh()), pytest.raises(PlacementError) as error:
        with verify(mlp):
            step(mlp)
    return error.value.name


def test_parameters_of_a_given_module_have_full_names() -> None:
    with_module = run_ranks({"dp": 1, "tp": 2}, with_mesh, unused_parameter)
    assert with_module == ["extra", "extra"]


def with_mesh(fn: Callable[[], Any]) -> Any:
    with set_current_mesh(device_mesh()):
        return fn()


def forward_only() -> None:
    built()(assert_type(tokens(), {"dp": S(0), "tp": I}))


def test_without_backward_no_gradient_is_missed() -> None:
    assert run_ranks(AXES, caught, forward_only)[0][0] == "nothing was found"


def one_step_each() -> list[str]:
    names: list[str] = []
    with set_current_mesh(device_mesh()), verify() as mode:
        for bad in (False, True, False):
            x = torch.ones(2) * (dist.get_rank() if bad else 1)
            assert_type(x, {"dp": R, "tp": R})
            try:
                mode.check()
                names.append("clean")
            except PlacementError as error:
                names.append(error.name)
    return names


def test_each_check_is_about_the_step_since_the_last() -> None:
    assert run_ranks(AXES, one_step_each)[0] == ["clean", "x", "clean"]


def two_meshes(sparse: Any) -> None:
    x = assert_type(torch.ones(2), {"dp": I, "tp": I})
    with set_current_mesh(sparse):
        y = torch.ones(2) * (dist.get_rank() == 3)
        assert_type(y, {"edp": R, "ep": R})
    assert_type(x * 2, {"dp": I, "tp": I})


def with_sparse_mesh() -> tuple[str, Any]:
    # Made before checking starts: making a mesh is itself a computation on tensors.
    sparse = device_mesh({"edp": 1, "ep": 4})
    return caught(lambda: two_meshes(sparse))


def test_values_on_another_mesh_over_the_same_ranks() -> None:
    _, error = run_ranks(AXES, with_sparse_mesh)[0]
    assert (error.name, error.axis) == ("y", "ep") and "ranks 0 and 3" in error.actual


def sizes_alone() -> Any:
    with set_current_mesh({"dp": 2, "tp": 4}), verify():
        x = assert_type(torch.ones(2), {"dp": R, "tp": P})
        return type_of(all_reduce(x, "tp", src=P, dst=R))


def test_a_mesh_of_sizes_alone_is_type_checked() -> None:
    assert sizes_alone() == {"dp": R, "tp": R}


def test_verify_implies_typecheck() -> None:
    with set_current_mesh({"tp": 2}), pytest.raises(PlacementError, match="expected"):
        with verify():
            assert_type(torch.ones(2), {"tp": P}).relu()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="Module or None"):
        verify("model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0"):
        verify(rtol=-1)
