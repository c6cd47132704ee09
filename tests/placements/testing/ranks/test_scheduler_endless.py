"""Ranks that do not end, and exceptions that cannot be shown."""

import threading
import time
from typing import ClassVar

import pytest
import torch.distributed as dist

from placements.testing import RankFailure, run_ranks
from placements.testing.ranks import scheduler


def ranks_alive() -> int:
    return sum(thread.name.startswith("rank ") for thread in threading.enumerate())


def settled(wanted: int) -> int:
    """The number of threads, once they had time to end."""
    until = time.monotonic() + 10
    while ranks_alive() > wanted and time.monotonic() < until:
        time.sleep(0.02)
    return ranks_alive()


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("stubborn", [False, True])
def test_an_endless_loop_leaves_no_thread(victim: int, stubborn: bool) -> None:
    def program() -> None:
        rank, swallowed = dist.get_rank(), 0
        while rank == victim:
            try:
                sum(range(100))
            except BaseException:
                swallowed += 1
                if not stubborn or swallowed > 3:
                    raise
        dist.barrier()

    assert run_ranks(3, dist.get_rank) == [0, 1, 2]
    threads = ranks_alive()
    with pytest.raises(RankFailure, match=r"without any collective") as caught:
        run_ranks(3, program, timeout=0.2)
    assert "runs at" in caught.value.pending[victim]
    assert settled(threads - 3) == threads - 3
    assert run_ranks(3, dist.get_rank) == [0, 1, 2]


def test_a_rank_that_sleeps_keeps_nobody_waiting() -> None:
    release = threading.Event()

    def program() -> None:
        if dist.get_rank() == 1:
            release.wait(30)
        dist.barrier()

    run_ranks(3, dist.get_rank)
    threads = ranks_alive()
    with pytest.raises(RankFailure, match=r"without any collective"):
        run_ranks(3, program, timeout=0.2)
    assert settled(threads - 2) == threads - 2  # only the one that sleeps is left
    release.set()
    assert settled(threads - 3) == threads - 3


class Unshowable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise LookupError("no text")


class Exits(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise SystemExit


def raises_unshowable() -> None:
    if dist.get_rank() == 1:
        raise Unshowable
    dist.barrier()


def raises_exits() -> None:
    if dist.get_rank() == 1:
        raise Exits
    dist.barrier()


@pytest.mark.parametrize(
    ("program", "kind", "other"),
    [(raises_unshowable, Unshowable, "LookupError"), (raises_exits, Exits, "SystemExit")],
)
def test_an_exception_that_cannot_be_shown_is_the_ranks(
    program: object, kind: type[Exception], other: str
) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, program, timeout=5)  # type: ignore[arg-type]
    failure = caught.value
    assert failure.rank == 1 and isinstance(failure.cause, kind)
    told = f"{kind.__name__}: (its text cannot be shown: __str__ raised {other})"
    assert told in failure.headline and told in failure.pending[1]
    assert "barrier" in failure.pending[0]
    assert run_ranks(2, dist.get_rank) == [0, 1]


class HandsOver(scheduler.Scheduler):
    """Rank 0 gives the baton to rank 1 as soon as somebody has looked who holds it."""

    seen: ClassVar[list[int]] = []

    @property
    def _holder(self) -> int:
        self.seen.append(min(len(self.seen), 1))
        if len(self.seen) == 2:
            self._done.release()
        return self.seen[-1]

    @_holder.setter
    def _holder(self, number: int) -> None:
        pass


def test_only_the_rank_that_holds_the_baton_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[threading.Thread] = []
    monkeypatch.setattr(scheduler, "_raise_in", lambda thread, error: told.append(thread))
    pool = scheduler.Scheduler(2)
    pool.__class__ = HandsOver
    pool._interrupt()
    assert len(HandsOver.seen) == 2 and told == []
    pool.__class__, pool.usable = scheduler.Scheduler, True
    pool.close()


def test_a_rank_without_the_baton_hands_none_over() -> None:
    pool = scheduler.Scheduler(3)
    batons: list[list[bool]] = []

    def task(number: int) -> None:
        if number == 0:
            pool._hand_over(1)  # as rank 1 would, interrupted after it handed over
            batons.append([rank.baton.locked() for rank in pool._ranks])

    pool.run(task)
    assert batons == [[True, True, True]]
    pool.close()
