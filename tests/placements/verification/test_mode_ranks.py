"""verify() where ranks do not run the same collectives."""

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placements import I, P, R, all_reduce, assert_type, set_current_mesh, verify
from placements.testing import RankFailure, device_mesh, run_ranks
from tests.support.verified import AXES, found


def swapped_collectives() -> None:
    """Both ranks run two all-reduces over tp, which meet, but not the same ones."""
    x = assert_type(torch.ones(2), {"dp": I, "tp": P})
    y = assert_type(torch.ones(2), {"dp": I, "tp": P})
    if dist.get_rank() % 2:
        all_reduce(y, "tp", src=P, dst=R)
        all_reduce(x, "tp", src=P, dst=R)
    else:
        all_reduce(x, "tp", src=P, dst=R)
        all_reduce(y, "tp", src=P, dst=R)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_ranks_that_ran_other_collectives(backend: Any) -> None:
    error = found(swapped_collectives, backend)
    assert error.axis == "tp" and error.where.startswith("all_reduce at") is False
    assert "rank 0: all-reduce at" in error.operands[0]


def skipped_collective() -> None:
    x = assert_type(torch.ones(2), {"dp": I, "tp": P})
    if dist.get_rank() != 1:
        all_reduce(x, "tp", src=P, dst=R)


def verified_skip() -> None:
    with set_current_mesh(device_mesh()), verify():
        skipped_collective()


def test_a_rank_that_skips_a_collective() -> None:
    # In simulation the ranks part at once, and are told so; no time runs out.
    with pytest.raises(RankFailure) as failure:
        run_ranks(AXES, verified_skip)
    assert "test_mode_ranks.py" in str(failure.value)


def raises_later() -> str:
    with set_current_mesh(device_mesh()):
        try:
            with verify():
                x = assert_type(torch.ones(2), {"dp": I, "tp": P})
                all_reduce(x, "tp", src=P, dst=R)
                raise RuntimeError("connection closed by peer")
        except RuntimeError as error:
            return error.__notes__[0]


def test_another_error_tells_what_the_rank_did_last() -> None:
    note = run_ranks(AXES, raises_later)[0]
    assert "started 1 collectives, the last one all-reduce at test_mode_ranks.py:" in note


def test_a_rank_that_others_do_not_meet_tells_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed_out(mesh: Any, log: Any, judge: Any) -> None:
        raise RuntimeError("connection closed by peer")

    # The package's name `verify` is the function.
    monkeypatch.setattr(sys.modules["placements.verification.mode"], "judged", timed_out)
    with pytest.raises(RuntimeError) as caught, verify():
        assert_type(torch.ones(2), {})
    assert "this rank was at the exchange of logs" in caught.value.__notes__[0]
