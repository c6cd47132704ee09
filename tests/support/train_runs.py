"""Runs of `spmd-moe train` as commands of their own, and the processes of their ranks."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = "--layers 1 --dim 8 --heads 2 --hidden-dim 8 --experts 4 --seq 6 --batch 4".split()
# Where pytest runs inside a job, the runs do not belong to it.
_JOB = ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in _JOB},
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
}
LONG = ["--steps", "10000"]  # never reached
TIME = 300  # seconds, on a machine that does much else

Run = subprocess.Popen[str]


def started(*arguments: str, **environment: str) -> Run:
    """Start a command of its own, whose Ctrl-C is not ours."""
    return started_by([sys.executable, "-m", "spmd_moe"], *arguments, **environment)


def started_by(command: list[str], *arguments: str, **environment: str) -> Run:
    # Where pytest runs in the background Ctrl-C is ignored, and children inherit that.
    heeded = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [*command, *arguments],
        env={**ENVIRONMENT, **environment}, start_new_session=True, preexec_fn=heeded,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(run: Run) -> None:
    """End a run that has not ended, and all that it started."""
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()


def ranks_of(pid: int) -> list[int]:
    """The processes that run a rank, by number."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found: dict[int, int] = {}
    for child in children:
        try:
            if b"spmd_moe.training.rank" not in Path(f"/proc/{child}/cmdline").read_bytes():
                continue
            said = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        (rank,) = (one[5:] for one in said if one.startswith(b"RANK="))
        found[int(rank)] = int(child)
    return [found[rank] for rank in sorted(found)]


def state_of(pid: int) -> str:
    """The letter of a process's state: R and S run, T is stopped, Z and "" have ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def wait_until(holds: Callable[[], bool], run: Run | None = None) -> None:
    deadline = time.monotonic() + TIME
    while not holds():
        assert run is None or run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
