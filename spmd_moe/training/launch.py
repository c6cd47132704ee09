"""Start local processes by torch's own launcher; when one fails, say which and why."""

import json
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from spmd_moe.training.errors import LossesDiffer, RankFailed, RunError, Unusable

HOST = "127.0.0.1"
LOST = "another rank ended or does not answer"
# What a rank tells of the run, not of itself.
OF_THE_RUN = {kind.__name__: kind for kind in (Unusable, LossesDiffer)}
TRIES = 5  # ports, each of which another program can take before it is used


def free_ports() -> Iterator[int]:
    """Yield a few ports that are free now."""
    for _ in range(TRIES):
        try:
            with socket.socket() as probe:
                probe.bind((HOST, 0))
                port = probe.getsockname()[1]
        except OSError:
            continue
        yield port


def check_port(port: int) -> None:
    """Raise Unusable if nothing can listen on `port`."""
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
    except OSError as error:
        raise Unusable(
            f"--port {port} cannot be used ({error}); give another, or none to have a free "
            "one chosen"
        ) from None


def launch(arguments: list[str], ranks: int, port: int | None, *, debug: bool) -> None:
    """Run Python with `arguments` on processes of this machine and wait for them.

    Raises RankFailed for the first rank that failed, or what a rank told of the run, or
    Unusable if there is no port for them to meet; by then no process is left.
    """
    logging.disable(logging.NOTSET if debug else logging.ERROR)  # told once, by us
    for tried in free_ports() if port is None else [port]:
        try:
            return _launch_at(tried, arguments, ranks)
        except dist.DistNetworkError as error:  # before any process was started
            if "EADDRINUSE" not in str(error):
                raise
    tried = f"{TRIES} ports were" if port is None else f"--port {port} was"
    raise Unusable(
        f"no port of {HOST} can be had for the processes to meet ({tried} tried); end "
        "programs that hold them, or give a free one by --port"
    )


def _launch_at(port: int, arguments: list[str], ranks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="spmd-moe-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id="spmd-moe",
            rdzv_backend="static",
            rdzv_endpoint=f"{HOST}:{port}",
            rdzv_configs={"rank": 0, "timeout": 60},
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            shutdown_timeout=5,
            # Not SIGINT: on KeyboardInterrupt the ranks get SIGTERM, which ends them.
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )
        start = cast(Any, elastic_launch(config, sys.executable))
        try:
            start(*arguments)
        except ChildFailedError as error:
            raise first_cause(error) from None
        except SignalException as error:
            raise RankFailed(
                f"stopped by {error.sigval.name}, and all ranks with it"
            ) from None


def first_cause(error: ChildFailedError) -> RunError:
    """Find the rank that failed by itself: the others only saw a lost connection."""

    def order(failure: ProcessFailure) -> tuple[int, int]:
        if failure.exitcode == -signal.SIGTERM:
            return 3, 0  # by the launcher, because of another
        if failure.exitcode < 0:
            return 0, 0
        return (2 if LOST in str(failure.message) else 1), failure.timestamp

    rank, first = min(error.failures.items(), key=lambda item: order(item[1]))
    others = "the other ranks were stopped"
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        return RankFailed(f"rank {rank} (pid {first.pid}) was killed by {name}; {others}")
    said: Any = first.message
    if isinstance(said, str):  # not what `report` wrote
        said = {"message": f"exit code {first.exitcode}", "kind": ""}
    message, kind = said["message"], said["kind"]
    if kind in OF_THE_RUN:
        return OF_THE_RUN[kind](message)
    return RankFailed(f"rank {rank} (pid {first.pid}) failed, {others}: {message}")


def message_of(error: Exception) -> str:
    """Return what an error says; of a lost connection only what concerns the reader."""
    if isinstance(error, RunError):
        return str(error)
    lost = re.search(r"gloo/\S+\] ([^.]*(?:\.\d[^.]*)*)", str(error))
    return f"{type(error).__name__}: {error}" if lost is None else f"{LOST}: {lost[1]}"


def report(error: Exception) -> None:
    """Write the file that the launcher reads, all of it or nothing.

    torch's own writer can be stopped half-way, by the launcher, which then cannot read it.
    """
    path = os.environ["TORCHELASTIC_ERROR_FILE"]
    said = {
        "message": message_of(error),
        "kind": type(error).__name__,
        "extraInfo": {"timestamp": str(int(time.time()))},
    }
    with open(f"{path}.new", "w") as file:
        json.dump({"message": said}, file)
    os.replace(f"{path}.new", path)
