"""End a run that is asked to end: after the step, on all ranks together, and saved.

Clusters send SIGTERM before they kill. One rank that got it is enough: after each step the
ranks tell each other.
"""

import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist


@contextmanager
def heeding_sigterm() -> Generator[Callable[[], bool]]:
    """Note SIGTERM instead of ending by it; yields a function: did it come?"""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are for the main thread
        return
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    # The launcher starts ranks with SIGTERM blocked, so that none comes too early.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)


def ranks_asked(asked: bool) -> list[int]:
    """Return the ranks that were asked to end, the same list on all of them.

    Communicates: an all-reduce of one number for each rank.
    """
    flags = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    flags[dist.get_rank()] = asked
    cast(Any, dist).all_reduce(flags)
    return cast(list[int], cast(Any, flags.nonzero().flatten()).tolist())


def say_stopped(asked: Sequence[int], ranks: int, step: int, *, saved: bool) -> str:
    who = f" to rank {', '.join(map(str, asked))}" if len(asked) < ranks else ""
    kept = "" if saved else "; nothing was saved, as there is no --checkpoint"
    return f"stopped by SIGTERM{who} after step {step}{kept}"
