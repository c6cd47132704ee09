"""Local processes by torch's own launcher, and, when one fails, which and why.

`python -m spmd_moe.training.launch JOB` is one of them.
"""

import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from typing import Any, cast

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spmd_moe.training.job import Job, job_from_json

HOST = "127.0.0.1"
LOST = "another rank ended or does not answer"


class RankFailed(Exception):  # noqa: N818 - says which rank and why
    """A rank ended before its time, and the others were stopped."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def check_port(port: int) -> None:
    """ValueError if nothing can listen on `port`."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"--port {port} cannot be used ({error}); give another, or none to have a free "
            "one chosen"
        ) from None


def launch(job: Job, port: int | None, *, debug: bool = False) -> None:
    """Run `job` on processes of this machine and wait for them.

    Raises RankFailed for the first rank that failed; by then no process is left.
    """
    logging.disable(logging.NOTSET if debug else logging.ERROR)  # told once, by us
    with tempfile.TemporaryDirectory(prefix="spmd-moe-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=job.parallel.num_ranks,
            run_id="spmd-moe",
            rdzv_backend="static",
            rdzv_endpoint=f"{HOST}:{port or free_port()}",
            rdzv_configs={"rank": 0, "timeout": 60},
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=5,
        )
        command = ["-m", "spmd_moe.training.launch", job.to_json()]
        start = cast(Any, elastic_launch(config, sys.executable))
        try:
            start(*command, *(["--debug"] if debug else []))
        except ChildFailedError as error:
            raise RankFailed(first_cause(error)) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RankFailed(
                f"stopped by {error.sigval.name}, and all ranks with it"
            ) from None


def first_cause(error: ChildFailedError) -> str:
    """The rank that failed by itself: a lost connection is what the others saw of it."""

    def order(failure: ProcessFailure) -> tuple[int, int]:
        if failure.exitcode == -signal.SIGTERM:
            return 3, 0  # by the launcher, because of another
        if failure.exitcode < 0:
            return 0, 0
        return (2 if LOST in str(failure.message) else 1), failure.timestamp

    failures = error.failures
    rank, first = min(failures.items(), key=lambda item: order(item[1]))
    others = "the other ranks were stopped"
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        return f"rank {rank} (pid {first.pid}) was killed by {name}; {others}"
    said = _message(first)
    return f"rank {rank} (pid {first.pid}) failed, {others}: {said}"


def _message(failure: ProcessFailure) -> str:
    said: Any = failure.message
    if isinstance(said, dict):  # what `report` wrote
        return cast(str, said["message"])
    return f"exit code {failure.exitcode}"


def told(error: Exception) -> str:
    """What an error says; of a lost connection only what concerns the reader."""
    lost = re.search(r"gloo/\S+\] ([^.]*(?:\.\d[^.]*)*)", str(error))
    return f"{type(error).__name__}: {error}" if lost is None else f"{LOST}: {lost[1]}"


def report(error: Exception) -> None:
    """Write the file that the launcher reads, all of it or nothing.

    torch's own writer can be stopped half-way, by the launcher, which then cannot read it.
    """
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    said = {
        "message": told(error),
        "extraInfo": {"timestamp": str(int(time.time()))},
    }
    with open(f"{path}.new", "w") as file:
        json.dump({"message": said}, file)
    os.replace(f"{path}.new", path)


def _end_with(parent: int) -> None:
    """No rank outlives the process that started it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """One rank. What goes wrong is told to the launcher, which tells it once."""
    from spmd_moe.cli.terminal import make_console
    from spmd_moe.training.loop import train
    from spmd_moe.training.world import given_world

    job, debug = job_from_json(sys.argv[1]), "--debug" in sys.argv[2:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher stops its ranks
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    world = given_world(os.environ)
    assert world is not None
    try:
        train(job, world, make_console())
    except Exception as error:
        report(error)
        if debug:
            raise
        sys.stdout.flush()
        os._exit(1)  # threads of the process group may be waiting for ranks that are gone


if __name__ == "__main__":
    main()
