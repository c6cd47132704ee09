"""Interleaved timing: rounds of every candidate in turn, medians compared."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One line of the report."""

    what: str
    shown: str
    limit: str
    ok: bool


def medians(
    candidates: Mapping[str, Callable[[], object]], *, calls: int, rounds: int = 31
) -> dict[str, float]:
    """Seconds per call of each candidate: the median over interleaved rounds."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def paired_difference(
    plain: Callable[[], object], other: Callable[[], object], *, calls: int, rounds: int = 31
) -> float:
    """Seconds per call that `other` takes over `plain`: median of paired rounds."""
    plain(), other()
    differences: list[float] = []
    for _ in range(rounds):
        spent: list[float] = []
        for run in (plain, other):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            spent.append((time.perf_counter() - start) / calls)
        differences.append(spent[1] - spent[0])
    return statistics.median(differences)
