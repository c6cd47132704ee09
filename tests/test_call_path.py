"""A call goes a short way through the package: an op, a refused op, a collective."""

import pytest
import torch

from benchmarks.call_path import measure
from placements import P, R, all_reduce, assert_type, set_current_mesh, typecheck
from placements.checker.lookup import KNOWN
from placements.runtime import callsite
from placements.runtime.forgotten import forget_questions


@pytest.mark.parametrize(
    ("call", "files", "switches"),
    [
        ("F.linear, the first time", 10, 36),
        ("p + r, refused", 16, 200),
        ("all_reduce", 14, 25),
    ],
)
def test_a_checked_call_stays_within_few_files(
    call: str, files: int, switches: int
) -> None:
    KNOWN.clear()  # other tests have called the same ops
    forget_questions()  # and asked for ranks, which a refusal would mention
    path = measure()[call]
    assert path.files <= files, sorted(set(path.calls))
    assert path.switches <= switches


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
