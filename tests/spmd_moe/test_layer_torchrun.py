"""The layer under torch's own launcher, and what happens when a rank is killed."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.train_steps import TIMEOUT

ROOT = Path(__file__).parents[2]
PROGRAM = "tests.support.train_steps"


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def torchrun(ranks: int, parallel: dict[str, Any]) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         "-m", PROGRAM, "--parallel", json.dumps(parallel)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    return torchrun(1, {})["losses"]


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
        (4, {"dp": 2, "tp": 2}),
    ],
)
def test_losses_equal_those_of_one_device(
    ranks: int, parallel: dict[str, Any], one_device: list[float]
) -> None:
    found = torchrun(ranks, parallel)
    assert found["gates_are_equal"]
    assert found["losses"] == pytest.approx(one_device, rel=1e-5)
    assert one_device[-1] < one_device[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_killed_rank_makes_the_other_exit_with_an_error_within_the_timeout() -> None:
    port = str(free_port())
    command = [sys.executable, "-m", PROGRAM, "--die-at", "1"]
    command += ["--parallel", '{"tp": 2, "ep": 2, "sequence_parallel": true}']
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=environment(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(rank), WORLD_SIZE="2"
            ),
        )
        for rank in range(2)
    ]  # fmt: skip
    killed, survivor = ranks[1], ranks[0]
    killed.communicate(timeout=300)
    start = time.monotonic()
    _, error = survivor.communicate(timeout=300)
    # The process group waits at most its timeout; the rest is the interpreter's exit.
    assert time.monotonic() - start < TIMEOUT.total_seconds() + 20
    assert killed.returncode == -9
    assert survivor.returncode not in (0, None)
    # The rows are on their way back; what rank 0 waits for is the all-gather meanwhile.
    assert "all_gather" in error and ("peer" in error or "timed out" in error.lower())
