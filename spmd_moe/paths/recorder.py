"""Which fast paths ran: counted by one recorder, if somebody listens.

A fast path says `ran(name)`. Who listens is the recorder of the innermost `recording()`
block of this thread, else the recorder of the process, which there is only if the
environment variable SPMD_MOE_FAST_PATHS is set; it is read once. That recorder prints one
line when the process ends: on rank 0, or on every rank if the variable is "all". In
compiled code nothing is counted, since the code that counts would be compiled into it.
"""

import atexit
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from threading import Lock

import torch

SWITCH = "SPMD_MOE_FAST_PATHS"
# Under these names launchers tell a process its rank; the first that is set holds.
RANKS = ("RANK", "PMI_RANK", "PALS_RANKID", "OMPI_COMM_WORLD_RANK")


@dataclass
class Amounts:
    """What one fast path reported: how often, and of what size."""

    times: int = 0
    total: int = 0
    least: int = 0
    most: int = 0

    def add(self, amount: int) -> None:
        self.least = min(self.least, amount) if self.times else amount
        self.most = max(self.most, amount) if self.times else amount
        self.times += 1
        self.total += amount


@dataclass
class Recorder:
    """Counts by name. Several threads may tell it."""

    amounts: dict[str, Amounts] = field(default_factory=dict[str, Amounts])
    _lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, name: str, amount: int) -> None:
        with self._lock:
            self.amounts.setdefault(name, Amounts()).add(amount)

    def counts(self) -> dict[str, int]:
        """Return the total of each name; of a path that has no size, how often it ran."""
        with self._lock:
            return {name: found.total for name, found in sorted(self.amounts.items())}

    def clear(self) -> None:
        with self._lock:
            self.amounts.clear()

    def line(self, rank: str) -> str:
        """Return the report as one line."""
        counts = [f"{name}={count}" for name, count in self.counts().items()]
        return f"[rank{rank}] {SWITCH} {' '.join(counts) or 'empty'}"


_listening: ContextVar[Recorder | None] = ContextVar("spmd_moe_fast_paths", default=None)


@contextmanager
def recording(recorder: Recorder | None = None) -> Generator[Recorder]:
    """Have `recorder`, or a new one, count the fast paths of this thread in the block."""
    recorder = Recorder() if recorder is None else recorder
    token = _listening.set(recorder)
    try:
        yield recorder
    finally:
        _listening.reset(token)


def ran(name: str, amount: int = 1) -> None:
    """Tell the recorder, if there is one, that the fast path of that name ran."""
    if torch.compiler.is_compiling():
        return
    recorder = _listening.get() or of_process()
    if recorder is not None:
        recorder.add(name, amount)


@cache
def of_process() -> Recorder | None:
    """Return the recorder that the environment asks for; it reports when Python ends."""
    if not is_switched_on(os.environ):
        return None
    recorder = Recorder()
    atexit.register(_report, recorder)
    return recorder


def is_switched_on(environment: Mapping[str, str]) -> bool:
    """Return whether the variable is one of 1, true, yes, rank0 and all, in any case."""
    return environment.get(SWITCH, "").lower() in ("1", "true", "yes", "rank0", "all")


def reporting_rank(environment: Mapping[str, str]) -> str | None:
    """Return the rank of this process if it is to report, else None."""
    rank = next((environment[name] for name in RANKS if environment.get(name)), "0")
    everybody = environment.get(SWITCH, "").lower() == "all"
    return rank if everybody or rank == "0" else None


def _report(recorder: Recorder) -> None:
    rank = reporting_rank(os.environ)
    if rank is not None:
        print(recorder.line(rank), file=sys.stderr, flush=True)
