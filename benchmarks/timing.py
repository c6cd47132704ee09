"""Interleaved timing: rounds of every candidate in turn, medians compared.

The time is that of this thread alone, because other programs may keep the machine busy.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    what: str
    shown: str
    limit: str
    ok: bool


@dataclass(frozen=True)
class Candidate:
    """A call to time, and the context that a round of calls runs in."""

    run: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = field(default=nullcontext)


def medians(
    candidates: Mapping[str, Candidate], *, calls: int, rounds: int = 31
) -> dict[str, float]:
    """Seconds per call of each candidate: the median over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, candidate in candidates.items():
            with candidate.context():
                candidate.run()
                start = time.thread_time()
                for _ in range(calls):
                    candidate.run()
                times[name].append((time.thread_time() - start) / calls)
    return {name: statistics.median(values) for name, values in times.items()}
