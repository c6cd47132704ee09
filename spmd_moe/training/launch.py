"""Start local processes, watch over them, and say which failed first and why.

The ranks meet at a store of this process, which listens on the loopback address alone. They
are started with SIGTERM blocked until they are ready to heed it, and they end with this
process, however it ends.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spmd_moe.training.errors import (
    LossesDiffer,
    RankFailed,
    RunError,
    Stopped,
    Unusable,
)
from spmd_moe.training.meeting import HOST, host_store, listening

LOST = "another rank ended or does not answer"
# What a rank tells of the run, not of itself.
OF_THE_RUN = {kind.__name__: kind for kind in (Unusable, LossesDiffer)}
REPORT = "SPMD_MOE_REPORT"  # in the environment of a rank: the file for its last words
LAUNCHER = "SPMD_MOE_LAUNCHER"  # and the process that it must not outlive

# What a rank does first: one whose launcher ended before it was tied to it ends as well.
_FIRST = f"""\
import os
if os.getppid() != int(os.environ["{LAUNCHER}"]):
    os._exit(1)
"""
_PR_SET_PDEATHSIG = 1

_LOOK = 0.02  # seconds between two looks at the ranks
_PATIENCE = 5.0  # for the cause, after ranks that saw only its consequences
_LEAST_TO_END = 60.0  # for a rank to end after another one did


def launch(
    program: str, arguments: list[str], ranks: int, port: int | None, timeout: float
) -> None:
    """Run a Python program on processes of this machine and wait for them.

    SIGTERM and SIGHUP are passed on as SIGTERM, on which ranks save and end. A rank that is
    stopped, or does not end when the others have, is waited for `timeout` seconds.
    Raises RankFailed for the first rank that failed, what a rank told of the run, or
    Stopped if they were asked to end; by then no process is left.
    """
    try:
        listener = listening(HOST, port or 0)
    except OSError as error:
        raise Unusable(
            f"no port of {HOST} can be had for the processes to meet ({error}); end "
            "programs that hold them, or give a free one by --port"
        ) from None
    store = host_store(listener, timeout)
    with tempfile.TemporaryDirectory(prefix="spmd-moe-") as reports, _asked() as asked:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # this process has the store
            LAUNCHER: str(os.getpid()),
        }
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with _blocked():
                for rank in range(ranks):
                    own = {"RANK": str(rank), REPORT: str(Path(reports, str(rank)))}
                    command = [sys.executable, "-c", _FIRST + program, *arguments]
                    processes.append(
                        subprocess.Popen(command, env=environment | own, preexec_fn=_tie)
                    )
            _Watch(processes, Path(reports), timeout, asked).until_the_end()
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()


def _tie() -> None:
    """Have Linux kill this process when its parent ends, even if it is stopped then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


@contextmanager
def _blocked() -> Generator[None]:
    """Start processes with signals blocked that they must not end by.

    Ctrl-C, which a terminal sends to all processes, is for the launcher; a rank unblocks
    SIGTERM when it can heed it.
    """
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _asked() -> Generator[list[signal.Signals]]:
    """Collect the signals that ask this process to end; one that is ignored stays so."""
    asked: list[signal.Signals] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, _: object) -> None:
        asked.append(signal.Signals(number))

    for one in (signal.SIGTERM, signal.SIGHUP):
        heeded = signal.getsignal(one) is not signal.SIG_IGN
        if heeded and threading.current_thread() is threading.main_thread():
            before[one] = signal.signal(one, note)
    try:
        yield asked
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class _Watch:
    """The ranks from their start to their end."""

    def __init__(
        self,
        processes: list[subprocess.Popen[bytes]],
        reports: Path,
        timeout: float,
        asked: list[signal.Signals],
    ) -> None:
        self._processes, self._reports = processes, reports
        self._timeout, self._asked = timeout, asked
        self._since: dict[object, float] = {}

    def until_the_end(self) -> None:
        """Wait until all ranks have ended; raise what went wrong."""
        passed_on = False
        while True:
            exits = {rank: one.poll() for rank, one in enumerate(self._processes)}
            ended = {rank: code for rank, code in exits.items() if code is not None}
            if error := self._cause({rank: code for rank, code in ended.items() if code}):
                raise error
            if len(ended) == len(exits):
                return
            self._check_stopped([rank for rank in exits if rank not in ended])
            if ended and self._lasts("the end", max(self._timeout, _LEAST_TO_END)):
                late = min(rank for rank in exits if rank not in ended)
                raise RankFailed(
                    f"{self._named(late)} did not end when rank {min(ended)} had; it was "
                    "killed"
                )
            if self._asked and not passed_on:
                passed_on = True
                for one in self._processes:
                    one.send_signal(signal.SIGTERM)
            if self._asked and self._lasts("being asked", self._timeout):
                raise RankFailed(
                    f"stopped by {self._asked[0].name}; ranks that had not ended within "
                    f"{self._timeout:g} s (--timeout) were killed"
                )
            time.sleep(_LOOK)

    def _cause(self, failed: Mapping[int, int]) -> RunError | None:
        """Return what ended the run; None as long as that is not clear."""
        if not failed:
            return None
        kinds = {rank: _kind(code, self._said(rank)) for rank, code in failed.items()}
        kind = min(kinds.values())
        rank = next(rank for rank in kinds if kinds[rank] == kind)
        all_ended = len(failed) == len(self._processes)
        if kind == _CONSEQUENCE:
            self._check_stopped(range(len(self._processes)), after=0.0)
            if not all_ended and not self._lasts("a consequence", _PATIENCE):
                return None
        if kind == _ASKED:
            if not all_ended and not self._lasts("the save", self._timeout):
                return None
            said = self._said(rank)["message"]
            return Stopped(said if not self._asked else self._by_the_launcher(said))
        return failure_of(self._named(rank), failed[rank], self._said(rank))

    def _by_the_launcher(self, said: str) -> str:
        """Leave out which ranks got the signal first: all got it from here."""
        said = re.sub(r" to rank [\d, ]+ after", " after", said)
        return said.replace("SIGTERM", self._asked[0].name, 1)

    def _said(self, rank: int) -> dict[str, str]:
        try:
            return json.loads((self._reports / str(rank)).read_text())
        except FileNotFoundError:
            return {"message": "", "kind": ""}

    def _named(self, rank: int) -> str:
        return f"rank {rank} (pid {self._processes[rank].pid})"

    def _check_stopped(self, ranks: Iterable[int], after: float | None = None) -> None:
        """Raise RankFailed for a rank that is stopped, now and for some time."""
        after = self._timeout if after is None else after
        for rank in ranks:
            if not _is_stopped(self._processes[rank]):
                self._since.pop(("stopped", rank), None)
            elif self._lasts(("stopped", rank), after):
                raise RankFailed(
                    f"{self._named(rank)} is stopped (SIGSTOP or the like) and did not "
                    f"answer within {self._timeout:g} s (--timeout); all ranks were killed"
                )

    def _lasts(self, what: object, seconds: float) -> bool:
        """Return whether `what`, which is the case now, has been for so long."""
        since = self._since.setdefault(what, time.monotonic())
        return time.monotonic() - since >= seconds


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    if process.returncode is not None or not hasattr(os, "waitid"):
        return False
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    try:
        return os.waitid(os.P_PID, process.pid, options) is not None
    except ChildProcessError:
        return False


# What the end of a rank says about the cause, the best first.
_OWN, _CONSEQUENCE, _ASKED = range(3)


def _kind(code: int, said: Mapping[str, str]) -> int:
    if said["kind"] == Stopped.__name__:
        return _ASKED
    # Threads of the process group abort a rank whose peers are gone.
    is_lost = code == -signal.SIGABRT or said["kind"] == RankFailed.__name__
    return _CONSEQUENCE if is_lost or LOST in said["message"] else _OWN


def failure_of(rank: str, code: int, said: Mapping[str, str]) -> RunError:
    """Say how a rank failed, by its exit code and its last words."""
    others = "the other ranks were stopped"
    if code < 0:
        return RankFailed(f"{rank} was killed by {signal.Signals(-code).name}; {others}")
    message, kind = said["message"] or f"exit code {code}", said["kind"]
    if kind in OF_THE_RUN:
        return OF_THE_RUN[kind](message)
    return RankFailed(f"{rank} failed, {others}: {message}")


def message_of(error: Exception) -> str:
    """Return what an error says; of a lost connection only what concerns the reader."""
    if isinstance(error, RunError):
        return str(error)
    lost = re.search(r"gloo/\S+\] ([^.]*(?:\.\d[^.]*)*)", str(error))
    return f"{type(error).__name__}: {error}" if lost is None else f"{LOST}: {lost[1]}"


def report(error: Exception) -> None:
    """Write the file that the launcher reads, all of it or nothing."""
    path = os.environ[REPORT]
    said = {"message": message_of(error), "kind": type(error).__name__}
    with open(f"{path}.new", "w") as file:
        json.dump(said, file)
    os.replace(f"{path}.new", path)
