"""Branches on numbers that belong to an axis are told where ranks part after them."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from placements import (
    BranchWarning,
    P,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    axis_rank,
    convert,
    set_current_mesh,
    typecheck,
    verify,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.extents import Padded

AXES = {"dp": 2, "tp": 2}


def same() -> Tensor:
    return assert_type(torch.ones(2, 3), {"dp": R, "tp": R})


def other_values() -> None:
    rank = axis_rank("tp")
    x = same()
    if rank == 0:  # THE BRANCH
        x = x * 2
    assert_type(x, {"dp": R, "tp": R})


def other_crossings() -> None:
    x = same()
    if axis_rank("tp"):  # THE BRANCH
        assert_type(x * 2, {"dp": R, "tp": R})


def by_a_size() -> None:
    rows = 3 - axis_rank("tp")
    x = assert_type(torch.ones(rows, 2), {"dp": R, "tp": S(0, Padded(5))})
    y = same()
    while y.sum().item() < 20 and x.shape[0] > 2:  # THE BRANCH
        y = y * 2
    assert_type(y, {"dp": R, "tp": R})


def by_a_key() -> None:
    factor = {0: 1.0, 1: 2.0}[axis_rank("tp")]  # THE BRANCH
    assert_type(same() * factor, {"dp": R, "tp": R})


def verified(program: Callable[[], None]) -> Any:
    """The error of verify(), or its warning, which is an error in these tests."""
    try:
        with set_current_mesh(device_mesh()), verify():
            program()
    except PlacementError as error:
        return error.axis, error.branch, str(error)
    except BranchWarning as warning:
        return str(warning)


def verified_in_a_process(program: Callable[[], None]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", BranchWarning)
        return verified(program)


PROGRAMS = [other_values, other_crossings, by_a_size, by_a_key]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_lie_names_the_branch_before_it(program: Callable[[], None]) -> None:
    for axis, branch, text in run_ranks(AXES, verified, program):
        assert axis == "tp" and branch.startswith("test_branches.py:")
        assert branch in text and "types do not follow branches" in branch
        assert "on ranks 0, 2" not in branch  # the ranks of one line of the axis
        assert line_of(program) == int(branch.split(":")[1])


def line_of(program: Callable[[], None]) -> int:
    lines, first = inspect.getsourcelines(program)
    return first + next(k for k, line in enumerate(lines) if "# THE BRANCH" in line)


def test_it_names_the_branch_on_gloo() -> None:
    for axis, branch, _ in run_ranks(AXES, verified, other_values, backend="gloo"):
        assert axis == "tp" and "rank == 0 (axis 'tp', of axis_rank('tp')) is " in branch
        assert "True on rank 0, False on rank 1" in branch or "True on rank 2" in branch


def harmless() -> None:
    if axis_rank("tp") == 0:
        pass
    assert axis_rank("tp") < 2  # alike on all ranks
    assert max(axis_rank("tp"), 2 * axis_rank("tp")) is not None  # keeps the axes
    assert f"{axis_rank('tp'):.2f}" + "%.1f" % axis_rank("tp")  # noqa: UP031
    assert_type(same(), {"dp": R, "tp": R})


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_branch_without_a_lie_is_a_warning(backend: Literal["sim", "gloo"]) -> None:
    program = verified if backend == "sim" else verified_in_a_process
    for text in run_ranks(AXES, program, harmless, backend=backend):
        assert text.startswith("verify: test_branches.py:")
        assert "axis_rank('tp') == 0 (axis 'tp') is True on rank" in text


def sends_in_one_arm() -> None:
    x = convert(same(), "tp", src=R, dst=P)
    if axis_rank("tp") == 0:
        all_reduce(x, "tp", src=P, dst=R)


@pytest.mark.parametrize("block", [typecheck, verify])
def test_the_simulator_names_the_branch_of_a_collective_in_one_arm(block: Any) -> None:
    def program() -> None:
        with set_current_mesh(device_mesh()), block():
            sends_in_one_arm()

    with pytest.raises(RankFailure) as failure:
        run_ranks({"dp": 1, "tp": 2}, program)
    (branch,) = failure.value.branches
    assert branch.startswith("test_branches.py:") and branch in str(failure.value)
    assert branch.endswith(
        "axis_rank('tp') == 0 (axis 'tp') is True on rank 0, False on rank 1"
    )


def note_of_a_rank_that_failed() -> str:
    """As a rank does that waits in a collective which the others do not run."""
    with set_current_mesh(device_mesh()):
        try:
            with verify():
                if axis_rank("tp") == 0:
                    raise TimeoutError
                raise ConnectionError
        except OSError as error:
            return error.__notes__[0]


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_rank_that_others_do_not_meet_tells_its_last_branch(
    backend: Literal["sim", "gloo"],
) -> None:
    notes = run_ranks({"tp": 2}, note_of_a_rank_that_failed, backend=backend)
    for note, answer in zip(notes, (True, False), strict=True):
        assert "its last branch on a number that belongs to an axis was test_br" in note
        assert f"axis_rank('tp') == 0 (axis 'tp'), with {answer} on this rank" in note


def test_a_refusal_names_the_branch_of_its_function() -> None:
    with set_current_mesh({"tp": 2}), typecheck():
        p = assert_type(torch.ones(2), {"tp": P})
        with pytest.raises(PlacementError) as caught:
            p.exp()
        assert not caught.value.branch
        if axis_rank("tp") == 0:
            with pytest.raises(PlacementError) as caught:
                p.exp()
        assert "axis_rank('tp') == 0 (axis 'tp') was True on this rank" in str(caught.value)


def test_an_error_of_all_ranks_has_no_branch() -> None:
    def program() -> None:
        with set_current_mesh(device_mesh()), typecheck():
            assert axis_rank("tp") == 0 or axis_rank("tp") == 1
            other_refusal()

    with pytest.raises(RankFailure) as failure:
        run_ranks({"tp": 2}, program)
    assert failure.value.branches == ()


def other_refusal() -> None:
    assert_type(torch.ones(2), {"tp": P}).exp()
