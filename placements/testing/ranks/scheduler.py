"""Threads that run one at a time, in a fixed order, until each has to wait.

A rank holds the baton while it computes. It gives the baton away only when it
waits for something that another rank has yet to do, so a program of ranks is
deterministic, and a deadlock is a fact (nobody can take the baton), not a
timeout. When one rank fails, every other rank is led to its next collective,
noted there, and unwound; the threads are then ready for the next run. A rank that
computes for ever is interrupted, so that no thread is left behind. This file does not
know how a collective moves data, nor process groups.
"""

import _thread
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch

from placements.runtime.forgotten import Forgotten, forget_questions, partings, questions
from placements.testing.ranks.failures import (
    RankFailure,
    describe_error,
    headline_of,
    innermost_line,
    lines_of,
    shown_line,
    text_of,
)

_GRACE_SECONDS = 5.0
# How long a rank that is interrupted may take, and how often it is told.
_UNWIND_SECONDS, _TELL_SECONDS = 1.0, 0.02

T = TypeVar("T")


class Aborted(BaseException):
    """Unwinds a rank after another one failed.

    Not an Exception: `except Exception` in the code under test must not catch it.
    """


class Awaited(Protocol):
    """Something a rank can wait for: one call of a collective."""

    @property
    def done(self) -> bool: ...

    def describe(self) -> str: ...


class _Rank:
    """What the scheduler knows of one rank."""

    def __init__(self) -> None:
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.thread: threading.Thread | None = None
        self.lost = False  # it does not return to Python, where it could be interrupted
        self.reset()

    def reset(self) -> None:
        self.started = False
        self.finished = False
        self.awaits: Awaited | None = None
        self.patient = True
        self.aborted_in: Awaited | None = None
        self.error: BaseException | None = None
        self.result: object = None
        self.questions: dict[Forgotten, list[Any]] = {}

    def describe(self) -> str:
        if self.error is not None:
            return describe_error(self.error)
        call = self.aborted_in or self.awaits
        if call is not None:
            return call.describe()
        if self.finished:
            return "returned"
        if not self.started:
            return "not started"
        thread = cast(threading.Thread, self.thread)
        frame = cast(Any, sys)._current_frames().get(thread.ident)
        return f"runs at {shown_line(innermost_line(lines_of(frame)))}"


class Scheduler:
    """`size` persistent threads that run a task each, one at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.usable = True
        self._closing = False
        self._ranks = [_Rank() for _ in range(size)]
        self._done = _thread.allocate_lock()
        self._done.acquire()
        self._headline: str | None = None
        self._first: int | None = None
        self._handovers = 0
        self._holder = 0  # the rank that has the baton
        self._task: Callable[[int], object] = lambda rank: None
        # set_num_threads also changes the default of threads born later; put it back.
        num_threads = torch.get_num_threads()
        for number, rank in enumerate(self._ranks):
            rank.thread = threading.Thread(
                target=self._serve, args=(number,), name=f"rank {number}", daemon=True
            )
            rank.thread.start()
        self.run(lambda rank: torch.set_num_threads(1))
        torch.set_num_threads(num_threads)

    def run(self, task: Callable[[int], T], timeout: float | None = None) -> list[T]:
        """Call `task(rank)` on every rank; its results by rank, or RankFailure.

        `timeout` bounds the time one rank may hold the baton, so it only ever
        strikes a rank that computes for that long or blocks on a foreign lock.
        """
        if not self.usable:
            raise RuntimeError("this pool of ranks was abandoned")
        self._forget()
        self._headline, self._first, self._task = None, None, task
        random_state = torch.default_generator.get_state()
        try:
            self._holder = 0
            self._ranks[0].baton.release()
            self._wait_for_all(timeout)
        finally:
            torch.default_generator.set_state(random_state)
            self._task = lambda rank: None
        headline = self._headline
        failure = None if headline is None else self._failure(headline)
        results = [cast(T, rank.result) for rank in self._ranks]
        self._forget()
        if failure is not None:
            raise failure
        return results

    def _forget(self) -> None:
        for rank in self._ranks:
            rank.reset()

    def announce(self, number: int, call: Awaited) -> None:
        """End rank `number` before a collective if the run has failed meanwhile."""
        if self._ranks[number].thread is not threading.current_thread():
            raise RuntimeError(
                f"rank {number} is simulated by a thread of its own; its collectives "
                f"cannot be called from {threading.current_thread().name!r}"
            )
        if self._headline is not None:
            self._abort(number, call)

    def fail(self, number: int, call: Awaited, headline: str) -> NoReturn:
        """End the run: the latest `call`, of rank `number`, shows a disagreement."""
        self._headline = self._headline or headline
        self._abort(number, call)

    def wait(self, number: int, call: Awaited) -> None:
        """Give the baton away until `call` is done."""
        if not self._rest(number, call, patient=True):
            self._abort(number, call)

    def poll(self, number: int, call: Awaited) -> bool:
        """Let the others run as far as they can, or until `call` is done: is it?"""
        return self._rest(number, call, patient=False)

    def _rest(self, number: int, call: Awaited, patient: bool) -> bool:
        if call.done:
            return True
        self.announce(number, call)
        rank = self._ranks[number]
        rank.awaits, rank.patient = call, patient
        # torch's generator belongs to the process; a rank has its own stream.
        random_state = torch.default_generator.get_state()
        self._hand_over(number)
        rank.baton.acquire()
        torch.default_generator.set_state(random_state)
        rank.awaits = None
        return call.done

    def close(self) -> None:
        """End the threads."""
        if not self.usable:
            return
        self.usable, self._closing = False, True
        for rank in self._ranks:
            rank.baton.release()
        for rank in self._ranks:
            cast(threading.Thread, rank.thread).join(_GRACE_SECONDS)

    def _abort(self, number: int, call: Awaited) -> NoReturn:
        rank = self._ranks[number]
        rank.aborted_in = rank.aborted_in or call
        raise Aborted

    def _serve(self, number: int) -> None:
        try:
            self._serve_tasks(number)
        except Aborted:
            pass  # interrupted between two tasks: `_interrupt` goes on without it

    def _serve_tasks(self, number: int) -> None:
        # Backward must stay on this thread: an autograd thread has no baton.
        torch.autograd.set_multithreading_enabled(False)
        rank = self._ranks[number]
        while True:
            rank.baton.acquire()
            if self._closing:
                return
            if self.usable:
                self._perform(number)
            if rank.lost:
                return  # the others have gone on without it
            rank.finished = True
            self._hand_over(number)
            if not self.usable:
                return

    def _perform(self, number: int) -> None:
        rank = self._ranks[number]
        rank.started = True
        forget_questions()
        try:
            with torch.enable_grad():
                rank.result = self._task(number)
        except Aborted:
            pass
        except BaseException as error:
            rank.error = error
            if self._headline is None:
                self._headline = f"rank {number} raised {headline_of(error)}"
                self._first = number
        finally:
            rank.questions = questions()

    def _can_run(self, rank: _Rank) -> bool:
        if rank.finished:
            return False
        return rank.awaits is None or rank.awaits.done or self._headline is not None

    def _hand_over(self, number: int) -> None:
        """Give the baton of rank `number` to the next rank that can run.

        A rank that was interrupted just after it gave the baton away has none to give: a
        second baton would let two ranks run at once.
        """
        if self._holder != number:
            return
        if all(rank.finished for rank in self._ranks):
            self._done.release()
            return
        order = [self._ranks[(number + i) % self.size] for i in range(1, self.size + 1)]
        following = next(filter(self._can_run, order), None)
        if following is not None:
            self._handovers += 1
        else:
            # Not counted as progress: ranks that only poll run into the timeout.
            asking = (r for r in order if not (r.finished or r.patient))
            following = next(asking, None)
        if following is None:
            self._headline = self._deadlock()
            following = next(filter(self._can_run, order))
        self._holder = self._ranks.index(following)
        following.baton.release()

    def _deadlock(self) -> str:
        returned = [r for r, rank in enumerate(self._ranks) if rank.finished]
        waiting = [r for r, rank in enumerate(self._ranks) if not rank.finished]
        if returned:
            return f"ranks {waiting} wait, but ranks {returned} returned"
        return f"ranks {waiting} wait for each other"

    def _failure(self, headline: str) -> RankFailure:
        pending = [rank.describe() for rank in self._ranks]
        cause = None if self._first is None else self._ranks[self._first].error
        errors = [rank.error for rank in self._ranks if rank.error is not None]
        asked = {number: rank.questions for number, rank in enumerate(self._ranks)}
        alike = len(errors) == self.size and len(set(map(text_of, errors))) == 1
        branches = [] if alike else list(partings(asked))
        return RankFailure(headline, pending, self._first, cause, errors, branches)

    def _wait_for_all(self, timeout: float | None) -> None:
        limit = -1 if timeout is None else timeout
        failure: RankFailure | None = None
        try:
            seen = self._handovers
            while failure is None and not self._done.acquire(timeout=limit):
                if self._handovers == seen:
                    headline = f"a rank ran for {timeout} s without any collective"
                    failure = self._failure(headline)  # while its line can be seen
                seen = self._handovers
        except BaseException:
            # Ctrl-C, a test timeout: let the ranks unwind, or give the threads up.
            self._headline = self._headline or "interrupted"
            if not self._done.acquire(timeout=_UNWIND_SECONDS):
                self._interrupt()
            raise
        if failure is not None:
            self._headline = self._headline or failure.headline
            self._interrupt()
            raise failure

    def _interrupt(self) -> None:
        """End all threads: the rank that has the baton is unwound where it is.

        One that does not return to Python (it sleeps, or waits for a foreign lock) ends
        when it does; the others are not kept waiting for it.
        """
        self.usable = False
        told_since = time.monotonic()
        told = -1
        while not self._done.acquire(timeout=_TELL_SECONDS):
            number = self._holder  # read once: the ranks run, and hand the baton on
            rank = self._ranks[number]
            if number != told:
                told, told_since = number, time.monotonic()
            thread = cast(threading.Thread, rank.thread)
            gone = not thread.is_alive()
            if not gone and self._holder == number:
                _raise_in(thread, Aborted)
            if gone or time.monotonic() - told_since > _UNWIND_SECONDS:
                rank.lost = rank.finished = True
                self._hand_over(number)


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> None:
    """Raise in a thread when it next runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(cast(int, thread.ident)), ctypes.py_object(error)
    )
