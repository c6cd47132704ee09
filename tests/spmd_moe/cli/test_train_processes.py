"""`spmd-moe train` on processes: a run is killed, interrupted, continued; nothing is left."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spmd_moe.cli.main import main
from spmd_moe.training.losses import read_losses
from spmd_moe.training.manifest import checkpoints_in, step_of
from tests.support.train_runs import (
    LONG,
    SMALL,
    TIME,
    Run,
    ended,
    free_port,
    is_running,
    ranks_of,
    started,
    wait_until,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")


@pytest.fixture(autouse=True)
def in_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Starts commands; none outlives the test."""
    runs: list[Run] = []

    def start_one(*arguments: str, **environment: str) -> Run:
        runs.append(started(*arguments, **environment))
        return runs[-1]

    yield start_one
    for run in runs:
        ended(run)


def test_a_run_is_killed_and_interrupted_and_ends_as_if_nothing_had_been(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    start: Callable[..., Run],
) -> None:
    directory, log = tmp_path / "run", tmp_path / "run" / "losses.jsonl"
    train = ["train", "--checkpoint", str(directory), "--save-every", "2"]

    def last_saved() -> int:
        return max((step_of(path) for path in checkpoints_in(directory)), default=0)

    def hint() -> str:
        return f"  continue from {checkpoints_in(directory)[-1]} with --resume\n"

    # A rank is killed. Until then nobody else can have the directory.
    run = start(*train, *SMALL, *LONG, "--mesh", "tp=2,ep=2,sp=on")
    wait_until(lambda: last_saved() >= 2, run)
    assert main([*train, "--resume", *LONG]) == 2
    assert "another run is using it" in capfd.readouterr().err
    ranks = ranks_of(run.pid)
    victim = random.Random(0).randrange(2)
    os.kill(ranks[victim], signal.SIGKILL)
    out, error = run.communicate(timeout=30)
    assert run.returncode == 1
    assert out == "Starting 2 processes (tp=2,ep=2,sp=on) ...\n"
    assert error == (
        f"spmd-moe train: rank {victim} (pid {ranks[victim]}) was killed by SIGKILL; the "
        f"other ranks were stopped\n{hint()}"
    )
    assert not any(is_running(pid) for pid in ranks)

    # It goes on on another mesh, until Ctrl-C.
    reached = last_saved()
    run = start(*train, "--resume", *LONG, "--mesh", "dp=2,ep=2")
    wait_until(lambda: last_saved() > reached, run)
    ranks = ranks_of(run.pid)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does
    stopped = time.monotonic()
    _, error = run.communicate(timeout=30)
    assert time.monotonic() - stopped < 4  # 0.5 where nothing else is done
    assert run.returncode == 130 and error == f"spmd-moe train: interrupted\n{hint()}"
    assert not any(is_running(pid) for pid in ranks)

    # It goes on inside a job, to the end.
    last = last_saved() + 3
    port = free_port()
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments = [*train, "--resume", "--steps", str(last), "--mesh", "cp=2"]
    other = start(*arguments, **job, RANK="1")
    for name, value in {**job, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(arguments) == 0
    assert other.communicate(timeout=TIME) == ("", "") and other.returncode == 0
    assert capfd.readouterr().out.count("Trained") == 1  # rank 0 alone
    monkeypatch.delenv("RANK")

    whole = tmp_path / "whole.jsonl"
    assert main(["train", *SMALL, "--steps", str(last), "--log", str(whole)]) == 0
    found, expected = read_losses(log), read_losses(whole)
    assert [loss.step for loss in found] == list(range(1, last + 1))
    assert [x.loss for x in found] == pytest.approx([x.loss for x in expected], rel=1e-5)


def test_no_rank_outlives_the_command(tmp_path: Path, start: Callable[..., Run]) -> None:
    log = tmp_path / "losses.jsonl"
    run = start("train", *SMALL, *LONG, "--mesh", "tp=2", "--log", str(log))
    wait_until(log.is_file, run)
    ranks = ranks_of(run.pid)
    assert len(ranks) == 2
    run.kill()
    run.communicate(timeout=TIME)
    wait_until(lambda: not any(is_running(pid) for pid in ranks))
