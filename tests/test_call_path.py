"""A collective that is right goes a short way through the package."""

import pytest
import torch

from benchmarks.call_path import measure
from placements import P, R, all_reduce, assert_type, set_current_mesh, typecheck
from placements.runtime import callsite


def test_a_checked_all_reduce_stays_within_few_files() -> None:
    path = measure()["all_reduce"]
    assert path.files <= 14
    assert path.switches <= 25


def test_a_collective_that_is_right_asks_for_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(callsite, "user_frame", lambda: asked.append("user_frame"))
    with set_current_mesh({"tp": 2}), typecheck():
        p = assert_type(torch.randn(4), {"tp": P})
        all_reduce(p, "tp", src=P, dst=R)
        assert not asked
        with pytest.raises(ValueError, match="expected Partial"):
            all_reduce(assert_type(torch.randn(4), {"tp": R}), "tp", src=P, dst=R)
        assert asked
