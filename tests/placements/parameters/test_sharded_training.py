"""A user's trainer resumes with its moments: to the bit on the same mesh."""

from pathlib import Path

import pytest

from placements.testing import run_ranks
from spmd_moe import Parallel
from tests.support.moe_run import SAVED, resumed, uninterrupted

DENSE = {"dp": 2, "cp": 1, "tp": 2}
OTHER = {"dp": 2, "cp": 1, "tp": 1}


@pytest.mark.parametrize("fsdp", [False, True])
def test_resumed_as_if_never_interrupted(tmp_path: Path, fsdp: bool) -> None:
    parallel = Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)
    path = tmp_path / "checkpoint"
    losses, *_ = run_ranks(DENSE, uninterrupted, parallel, fsdp, path, backend="gloo")
    again, *_ = run_ranks(DENSE, resumed, parallel, fsdp, path, backend="gloo")
    assert again == losses[SAVED:]
    for other in (False, True):
        moved, *_ = run_ranks(
            OTHER, resumed, Parallel(dp=2, ep=2), other, path, backend="gloo"
        )
        assert moved == pytest.approx(losses[SAVED:], rel=1e-12)
