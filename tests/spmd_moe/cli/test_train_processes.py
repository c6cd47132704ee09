"""`spmd-moe train` on processes: a run is killed, interrupted, continued; nothing is left."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from spmd_moe.cli.main import main
from spmd_moe.training.launch import free_ports
from spmd_moe.training.losses import read_losses
from spmd_moe.training.manifest import checkpoints_in, step_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")

ROOT = Path(__file__).parents[3]
SMALL = "--layers 1 --dim 8 --heads 2 --hidden-dim 8 --experts 4 --seq 6 --batch 4".split()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LONG = ["--steps", "10000"]  # never reached
TIME = 120  # seconds, on a machine that does much else


@pytest.fixture(autouse=True)
def in_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


Run = subprocess.Popen[str]


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Commands of their own, whose Ctrl-C is not ours; none outlives the test."""
    runs: list[Run] = []

    def started(*arguments: str, **environment: str) -> Run:
        # Where pytest runs in the background Ctrl-C is ignored, and children inherit that.
        heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        run = subprocess.Popen(
            [sys.executable, "-m", "spmd_moe", *arguments],
            env={**ENVIRONMENT, **environment}, start_new_session=True, preexec_fn=heeded,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        runs.append(run)
        return run

    yield started
    for run in runs:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()


def ranks_of(pid: int) -> list[int]:
    """The processes that run a rank, by number."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found: dict[int, int] = {}
    for child in children:
        if b"spmd_moe.training.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
            said = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            (rank,) = (one[5:] for one in said if one.startswith(b"RANK="))
            found[int(rank)] = int(child)
    return [found[rank] for rank in sorted(found)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds: Callable[[], bool], run: Run | None = None) -> None:
    deadline = time.monotonic() + TIME
    while not holds():
        assert run is None or run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


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
    (port, *_) = free_ports()
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
