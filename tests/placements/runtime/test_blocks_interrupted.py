"""A signal at any moment leaves no block half entered or half left."""

import dis
import functools
import gc
import itertools
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

import pytest

import placements
from placements import typecheck
from placements._torch import probes
from placements.checker import block as checking
from placements.checker import patches
from placements.runtime.state import current
from tests.support.blocks import (
    AT_ONCE,
    BEFORE,
    BLOCKS,
    Interrupted,
    assert_clean,
    assert_next_block_works,
    changes,
    snapshot,
)
from tests.support.blocks import on_two_ranks as on_two_ranks

# Python looks for signals when a function begins, after it was called, and in loops.
LOOKS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD", "RESUME")


@functools.cache
def moments(code: CodeType) -> frozenset[int]:
    """The offsets of bytecodes before which Python has looked for signals."""
    steps = [i for i in dis.get_instructions(code) if i.opname != "CACHE"]
    pairs = itertools.pairwise(steps)
    return frozenset(then.offset for i, then in pairs if i.opname.startswith(LOOKS))


@functools.cache
def yields(code: CodeType) -> frozenset[int]:
    steps = dis.get_instructions(code)
    return frozenset(i.offset for i in steps if i.opname in ("YIELD_VALUE", "RESUME"))


def interrupt_at(
    k: int, make: Callable[[], AbstractContextManager[Any]], left_only: bool = False
) -> bool:
    """Raise at the k-th moment at which a signal can raise in our code; False: there is none.

    The block is empty.
    """
    seen, raised = 0, False
    package = placements.__path__[0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal seen, raised
        if not frame.f_code.co_filename.startswith(package):
            return None
        frame.f_trace_opcodes = True
        # A generator that is closed goes on with the exception; no signal is looked for.
        begins = event == "call" and frame.f_lasti not in yields(frame.f_code)
        opcode = event == "opcode" and frame.f_lasti in moments(frame.f_code)
        if begins or opcode:
            seen += 1
            if seen == k:
                raised = True
                raise Interrupted
        return trace

    outer = sys.gettrace()
    block = make() if left_only else None
    if block is not None:
        block.__enter__()
    sys.settrace(trace)
    try:
        if block is not None:
            block.__exit__(None, None, None)
        else:
            with make():
                pass
    except Interrupted:
        pass
    finally:
        sys.settrace(outer)
    return raised


@pytest.mark.parametrize("name", BLOCKS)
def test_an_interrupt_at_any_moment_of_a_block_leaves_nothing_behind(name: str) -> None:
    interrupt_at(10**9, BLOCKS[name])  # what is made once is made, and Python 3.12 traces
    k = 1
    while interrupt_at(k, BLOCKS[name]):
        assert_clean()
        k += 1
    assert k > 10
    assert_next_block_works()


@pytest.mark.parametrize("name", AT_ONCE)
def test_an_interrupt_while_a_block_that_acts_at_once_is_left(name: str) -> None:
    k = 1
    while interrupt_at(k, AT_ONCE[name], left_only=True):
        assert_clean()
        k += 1
    assert_clean()


def test_an_interrupt_while_what_is_made_once_is_made(monkeypatch: Any) -> None:
    for k in itertools.count(1, 29):
        monkeypatch.setattr(patches, "_last", [])
        monkeypatch.setattr(probes, "_works", set())
        raised = interrupt_at(k, typecheck)
        assert_clean()
        if not raised:
            break
    assert_next_block_works()


def test_an_interrupt_at_any_moment_of_an_inner_block_keeps_the_outer_one() -> None:
    with typecheck() as mode:
        inside = snapshot()
        for make in BLOCKS.values():
            k = 1
            while interrupt_at(k, make):
                assert changes(inside) == []
                k += 1
        assert current.mode is mode


@pytest.mark.parametrize("name", ["typecheck", "verify"])
def test_signals_at_random_moments_leave_nothing_behind(name: str) -> None:
    rng, hits = random.Random(0), 0

    def handler(number: int, frame: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    gc.disable()  # what is raised in a callback of the collector is lost
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1e-3))
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    with BLOCKS[name]():
                        pass
            except Interrupted:
                hits += 1
            assert_clean()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert hits == 300
    assert_next_block_works()


def test_a_handler_may_open_a_block_of_its_own() -> None:
    opened = []

    def handler(number: int, frame: Any) -> None:
        with typecheck():
            opened.append(current.mode)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for k in range(50):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + k * 1e-5)
            while len(opened) <= k:
                with typecheck():
                    pass
            assert_clean()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert_next_block_works()


def test_two_interrupts_in_a_row_are_healed_by_the_next_block() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checking, "_leaving", lambda block, left: 1 / 0
        )  # so that nothing is undone
        with pytest.raises(ZeroDivisionError), typecheck():
            pass
    assert changes(BEFORE) and current.mode is None
    assert_next_block_works()
