"""`spmd-moe train` on processes: one is killed, and the run goes on elsewhere."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_moe.cli.main import main
from spmd_moe.training.losses import read_losses

ROOT = Path(__file__).parents[2]
SMALL = "--layers 1 --dim 8 --heads 2 --hidden-dim 8 --num-experts 4 --seq-len 6 --batch 4".split()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LONG = 10_000  # never reached


def wait_until(holds: Callable[[], bool], run: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def steps_in(log: Path) -> int:
    return len(read_losses(log)) if log.is_file() else 0


@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")
def test_a_killed_run_is_continued_on_fewer_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    directory, log = tmp_path / "run", tmp_path / "run" / "losses.jsonl"
    train = ["train", "--checkpoint", str(directory), "--save-every", "2"]
    command = [sys.executable, "-m", "spmd_moe", *train, *SMALL, "--steps", str(LONG)]
    run = subprocess.Popen(
        [*command, "--mesh", "dp=2,tp=2,ep=2,sp=on"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: steps_in(log) >= 3, run)
    ranks = ranks_of(run.pid)
    assert len(ranks) == 4
    victim = random.randrange(4)
    os.kill(ranks[victim], signal.SIGKILL)
    start = time.monotonic()
    _, error = run.communicate(timeout=60)
    assert time.monotonic() - start < 30
    assert run.returncode == 1
    last = max(path.name for path in directory.glob("step-*"))
    assert error == (
        f"spmd-moe train: rank {victim} (pid {ranks[victim]}) was killed by SIGKILL; the "
        f"other ranks were stopped\n  continue from {directory / last} with --resume\n"
    )
    assert not any(is_running(pid) for pid in ranks)

    # The machine may have done many steps: go on a little from where it was.
    reached = int(last.removeprefix("step-"))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    arguments = [*train, "--resume", "--steps", str(reached + 3), "--mesh", "tp=2,ep=2"]
    inside = subprocess.run(
        [*torchrun, "-m", "spmd_moe", *arguments],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert inside.returncode == 0, inside.stderr
    assert inside.stdout.count("Trained") == 1  # rank 0 alone

    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert main([*train, "--resume", "--steps", str(reached + 5)]) == 0
    whole = tmp_path / "whole.jsonl"
    assert main(["train", *SMALL, "--steps", str(reached + 5), "--log", str(whole)]) == 0
    found, expected = read_losses(log), read_losses(whole)
    assert [loss.step for loss in found] == list(range(1, reached + 6))
    assert [x.loss for x in found] == pytest.approx([x.loss for x in expected], rel=1e-5)


@pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")
@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_the_command(kill: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "losses.jsonl"
    command = [sys.executable, "-m", "spmd_moe", "train", *SMALL, "--steps", str(LONG)]
    run = subprocess.Popen(
        [*command, "--mesh", "tp=2", "--log", str(log)],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_until(lambda: steps_in(log) >= 1, run)
    ranks = ranks_of(run.pid)
    run.send_signal(kill)
    _, error = run.communicate(timeout=60)
    if kill == signal.SIGINT:
        assert run.returncode == 130 and error == "spmd-moe train: interrupted\n"
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.1)
