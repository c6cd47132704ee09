"""Pools of real gloo processes, one per number of ranks, reused from call to call.

The processes are forked from a server that has imported torch and nothing else
(`forkserver`): they start in a fraction of a second and inherit neither threads nor
the simulator's state. A function travels by its import name, so it has to be at
module level. This file knows nothing about meshes or the simulator.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import copy_context
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from placements.testing.ranks.failures import (
    RankFailure,
    describe_error,
    headline_of,
    innermost_line,
    shown_line,
)

T = TypeVar("T")
Task = Callable[[tuple[object, ...]], T]

_stores: Any = dist  # torch exports these without saying so
_STOP = b""
_STARTED = b"started"
_START_SECONDS = 120.0
_SHUTDOWN_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # of Linux: the signal for a process whose parent ends
_ANSWER_SECONDS = 2.0
_CAUSE_SECONDS = 2.0
_LOST = "/gloo/transport/"  # in the text of an error: a peer is gone
_CAN_ASK = hasattr(faulthandler, "register")  # not on Windows
_FRAME = re.compile(r'File "(.*)", line (\d+) in')


def run_on_processes(
    size: int, task: Task[T], args: tuple[object, ...], timeout: float
) -> list[T]:
    """Call `task(args)` in each of `size` gloo processes; the results, by rank."""
    payload = _packed(task, args)
    pool = _pools.get(size)
    if pool is None or pool.timeout < timeout:
        if pool is not None:
            pool.close()
        pool = _pools[size] = _Pool(size, timeout)
    try:
        return cast(list[T], pool.run(payload, timeout))
    except BaseException:
        # The survivors may sit in a collective for ever: start afresh next time.
        del _pools[size]
        pool.kill()
        raise


def _packed(task: Task[T], args: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((sys.path, pickle.dumps((task, args))))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(
            "backend='gloo' sends fn and its arguments to other processes: fn must be "
            f"a function at module level and the arguments picklable ({error})"
        ) from error


class _Pool:
    """`size` processes with an initialised gloo group, and a pipe to each."""

    def __init__(self, size: int, timeout: float) -> None:
        self.timeout = timeout
        self._directory = tempfile.TemporaryDirectory(prefix="placements-gloo-")
        methods = multiprocessing.get_all_start_methods()
        method = "forkserver" if "forkserver" in methods else "spawn"
        context = cast(Any, multiprocessing.get_context(method))
        if method == "forkserver":
            context.set_forkserver_preload(["torch.distributed.tensor"])
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            arguments = (rank, size, self._directory.name, timeout, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for rank, pipe in enumerate(self._pipes):
            if not _has_started(pipe):
                self.kill()
                pending = ["starting" for _ in range(size)]
                raise RankFailure(f"gloo process {rank} did not start", pending)

    def run(self, payload: bytes, timeout: float) -> list[object]:
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(payload)
        reports: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                headline = f"ranks {late} did not finish in {timeout} s"
                raise self._failure(headline, reports)
            for pipe in cast(list[Connection], ready):
                rank = waiting.pop(pipe)
                reports[rank] = self._received(rank, pipe)
                if not reports[rank][0]:
                    first = self._first_cause(rank, waiting, reports)
                    _, value = reports[first]
                    headline = f"rank {first} {value[0]}"
                    raise self._failure(headline, reports, first, value[2])
        return [reports[rank][1] for rank in range(len(self._pipes))]

    def _first_cause(
        self,
        rank: int,
        waiting: dict[Connection, int],
        reports: dict[int, tuple[bool, Any]],
    ) -> int:
        """Return the rank that failed by itself, if `rank` has only lost a connection."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while _LOST in reports[rank][1][0]:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in cast(list[Connection], ready):
                other = waiting.pop(pipe)
                reports[other] = self._received(other, pipe)
                if not reports[other][0] and _LOST not in reports[other][1][0]:
                    return other
        return rank

    def _received(self, rank: int, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(_SHUTDOWN_SECONDS)
            text = f"died with exit code {self._processes[rank].exitcode}"
            return False, (text, text, None)

    def _failure(
        self,
        headline: str,
        reports: dict[int, tuple[bool, Any]],
        rank: int | None = None,
        cause: BaseException | None = None,
    ) -> RankFailure:
        silent = [r for r in range(len(self._pipes)) if r not in reports]
        pending = self._whereabouts(silent)
        for number, (fine, value) in reports.items():
            pending[number] = "returned" if fine else value[1]
        return RankFailure(
            headline, [text for _, text in sorted(pending.items())], rank, cause
        )

    def _whereabouts(self, ranks: list[int]) -> dict[int, str]:
        """Return where silent ranks are, as their fault handlers tell."""
        asked = [r for r in ranks if _CAN_ASK and self._processes[r].is_alive()]
        for rank in asked:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        places = dict.fromkeys(ranks, "did not report")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while asked and time.monotonic() < deadline:
            time.sleep(0.02)
            for rank in list(asked):
                stack = _stack_file(self._directory.name, rank).read_text()
                frames = _FRAME.findall(stack.split("\n\n")[-1])  # of the main thread
                lines = [(file, int(number)) for file, number in frames]
                ours = [i for i, line in enumerate(lines) if line[0] == __file__]
                # All of it is there once it has come to this file, or is cut off.
                if ours or stack.endswith("...\n"):
                    line = innermost_line(lines[: ours[0]] if ours else lines)
                    places[rank] = f"did not report, is at {shown_line(line)}"
                    asked.remove(rank)
        return places

    def close(self) -> None:
        """Let the processes leave their group and end."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(_STOP)
        for process in self._processes:
            process.join(_SHUTDOWN_SECONDS)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()


_pools: dict[int, _Pool] = {}


@atexit.register
def _close_pools() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def _has_started(pipe: Connection) -> bool:
    try:
        return pipe.poll(_START_SECONDS) and pipe.recv_bytes() == _STARTED
    except (EOFError, ConnectionResetError):
        return False


def _stack_file(directory: str, rank: int) -> Path:
    return Path(directory, f"stack-{rank}")


def _serve(rank: int, size: int, directory: str, timeout: float, pipe: Connection) -> None:
    """Run tasks in one process until it is told to stop."""
    _end_with_the_caller()
    torch.set_num_threads(1)
    if _CAN_ASK:
        faulthandler.register(signal.SIGUSR1, _stack_file(directory, rank).open("w"))
    store = _stores.FileStore(f"{directory}/store", size)
    for generation in itertools.count():
        # Again only if the last task destroyed the world.
        dist.init_process_group(
            "gloo",
            store=_stores.PrefixStore(str(generation), store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        if generation == 0:
            pipe.send_bytes(_STARTED)
        while dist.is_initialized():
            message = _next_message(pipe)
            if message == _STOP:
                dist.destroy_process_group()
                return
            pipe.send_bytes(_report(message))


def _end_with_the_caller() -> None:
    """End this process when the one that has the pool ends, whatever a task does then.

    A thread waits for that. Linux also kills this process with its parent, the server,
    which ends with the caller too: so a task ends that is stopped or never leaves C. The
    server ends when nobody holds its pipe, so this process must not hold it either.
    """
    caller = cast(Any, multiprocessing.parent_process())
    server = getattr(forkserver, "_forkserver", None)
    held = getattr(server, "_forkserver_alive_fd", None)
    if held is not None:
        os.close(held)
        cast(Any, server)._forkserver_alive_fd = None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))

    def end() -> None:
        wait([caller.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def _next_message(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except EOFError:  # the parent died
        return _STOP


def _report(message: bytes) -> bytes:
    try:
        sys.path[:], inner = pickle.loads(message)
        task, args = pickle.loads(inner)
        # What a task leaves set (a current mesh) ends with it.
        return pickle.dumps((True, copy_context().run(task, args)))
    except BaseException as error:
        text = describe_error(error)
        error.add_note("".join(traceback.format_exception(error)))
        headline = f"raised {headline_of(error)}"
        try:
            pickle.loads(pickle.dumps(error))
            return pickle.dumps((False, (headline, text, error)))
        except Exception:
            stand_in = RuntimeError(headline_of(error))
            return pickle.dumps((False, (headline, text, stand_in)))
