"""`spmd-moe train`: who outlives whom, where it listens, who is blamed, two nodes, FSDP2."""

import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_moe.training.losses import read_losses
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
    started_by,
    wait_until,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds ranks in /proc")

TWO_AXES = ("--mesh", "dp=2,tp=2,ep=2")


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    found: list[Run] = []
    yield found
    for run in found:
        ended(run)


def addresses(pid: int) -> set[str]:
    """The addresses on which a process listens."""
    open_files = Path(f"/proc/{pid}/fd").iterdir()
    inodes = {
        os.readlink(file)[8:-1] for file in open_files if "socket:" in os.readlink(file)
    }
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[k] for k in (1, 3, 9))
            if state == "0A" and inode in inodes:  # LISTEN
                words = local.split(":")[0]
                if table == "tcp":
                    packed = struct.pack("<I", int(words, 16))
                    found.add(socket.inet_ntop(socket.AF_INET, packed))
                else:
                    found.add(words)
    return found


def test_only_the_loopback_address_is_listened_on_and_the_rank_that_was_asked_is_named(
    tmp_path: Path, runs: list[Run]
) -> None:
    log = tmp_path / "losses.jsonl"
    run = started("train", *SMALL, *LONG, *TWO_AXES, "--log", str(log))
    runs.append(run)
    wait_until(lambda: log.is_file() and len(log.read_text().splitlines()) > 1, run)
    ranks = ranks_of(run.pid)
    assert len(ranks) == 4
    assert [addresses(pid) for pid in (run.pid, *ranks)] == [{"127.0.0.1"}] * 5
    os.kill(ranks[2], signal.SIGTERM)
    _, error = run.communicate(timeout=TIME)
    assert run.returncode == 143 and "stopped by SIGTERM to rank 2 after step" in error
    assert not any(map(is_running, ranks))


def test_no_rank_outlives_a_launcher_that_is_killed_while_they_import(
    runs: list[Run],
) -> None:
    run = started("train", *SMALL, *LONG, *TWO_AXES)
    runs.append(run)
    wait_until(lambda: len(ranks_of(run.pid)) == 4, run)
    ranks = ranks_of(run.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    run.kill()
    run.wait(timeout=TIME)
    wait_until(lambda: not any(map(is_running, ranks)))
    run.communicate()


def test_one_run_on_two_nodes_of_torchrun(tmp_path: Path, runs: list[Run]) -> None:
    """Two agents on the loopback address, with two ranks each."""
    directory, whole = tmp_path / "run", tmp_path / "whole.jsonl"
    log = directory / "losses.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    meet = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    meet += ["--master-port", str(free_port())]
    train = ["-m", "spmd_moe", "train", *SMALL, "--steps", "3", *TWO_AXES]
    for node in ("0", "1"):
        command = [
            *torchrun,
            "--node-rank",
            node,
            *meet,
            *train,
            "--checkpoint",
            str(directory),
        ]
        runs.append(started_by(command))
    for run in runs:
        _, error = run.communicate(timeout=TIME)
        assert run.returncode == 0, error
    alone = started("train", *SMALL, "--steps", "3", "--log", str(whole))
    runs.append(alone)
    alone.communicate(timeout=TIME)
    losses, expected = ([x.loss for x in read_losses(file)] for file in (log, whole))
    assert losses == pytest.approx(expected, rel=1e-12) and len(losses) == 3


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--fsdp"], marks=pytest.mark.deep),
        ["--fsdp", "--verify", "2"],
        pytest.param(["--fsdp", "--compile", "aot_eager"], marks=pytest.mark.deep),
        ["--dtype", "bfloat16"],
    ],
    ids=" ".join,
)
def test_what_changes_the_step_does_not_change_the_losses(
    more: list[str], tmp_path: Path, runs: list[Run]
) -> None:
    """The command itself compares with one device, after a resume too."""
    train = ["train", "--checkpoint", str(tmp_path / "run"), *TWO_AXES]
    train += ["--compare", str(tmp_path / "losses.png")]
    again = more if "--fsdp" in more else []  # a dtype is in the checkpoint
    for rest in ([*SMALL, *more, "--steps", "3"], ["--resume", *again, "--steps", "6"]):
        run = started(*train, *rest)
        runs.append(run)
        out, error = run.communicate(timeout=TIME)
        assert run.returncode == 0, error
        assert "largest relative difference" in out
    found = read_losses(tmp_path / "run" / "losses.jsonl")
    worst = max(loss.difference or 0.0 for loss in found)
    assert len(found) == 6 and worst < (1e-12 if "--fsdp" in more else 1e-2)
