"""Interleaved timing, and how sure a ratio is.

The contenders take turns, so a busy moment hits neighbours alike, and what is compared are
the pairs of one round. The bound is that of a bootstrap over the rounds.
"""

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

DRAWS = 2000
HOPELESS = 4


@dataclass(frozen=True)
class Times:
    """Seconds of each round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half of the rounds lie this far apart, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of the rounds, and its upper 95 % bound."""

    median: float
    upper: float


def timed(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    budget: float,
    *,
    by_clock: bool = False,
) -> dict[str, Times]:
    """Time each call once a round; fewer rounds, but 7 at least, if `budget` runs out.

    With one thread it is the time of this thread, without what others take of the
    processor, unless it is to be `by_clock`.
    """
    alone = torch.get_num_threads() == 1 and not by_clock
    clock = time.thread_time if alone else time.perf_counter
    found: dict[str, list[float]] = {name: [] for name in calls}
    once: dict[str, float] = {}
    for name, call in calls.items():
        start = clock()
        call()
        once[name] = clock() - start
    # What is this much slower would take the time of all; what is known of it will do.
    limit = float("inf") if by_clock else HOPELESS * min(once.values())
    order = [name for name in calls if once[name] < limit]
    begun = time.monotonic()
    for done in range(rounds):
        if done >= 7 and time.monotonic() - begun > budget:
            break
        for name in order:
            start = clock()
            calls[name]()
            found[name].append(clock() - start)
        order = order[1:] + order[:1]  # nobody always follows the same one
    return {n: Times(seconds or [once[n]]) for n, seconds in found.items()}


def ratio(ours: Times, other: Times) -> Ratio:
    """Ours over another, round by round."""
    pairs = [a / b for a, b in zip(ours.seconds, other.seconds, strict=True)]
    chance = random.Random(0)
    medians = sorted(
        statistics.median(chance.choices(pairs, k=len(pairs))) for _ in range(DRAWS)
    )
    return Ratio(statistics.median(pairs), medians[int(0.975 * DRAWS)])
