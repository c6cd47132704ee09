"""Entering and leaving a block is atomic, whatever raises; tasks and generators keep theirs."""

import asyncio
import contextlib
import copy
import dis
import functools
import gc
import itertools
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch._dynamo  # whose stance a block replaces, too
from torch import Tensor, nn

import placements
from placements import (
    PlacementError,
    R,
    S,
    _torch,
    assert_type,
    current_mesh,
    ledger,
    own_generator,
    set_current_mesh,
    set_gradient_dtype,
    shared_generator,
    type_of,
    typecheck,
    verify,
)
from placements._torch import UnsupportedTorchError
from placements.checker import block as checking
from placements.checker import patches
from placements.collectives.precision import gradient_dtype
from placements.runtime.blocks import together
from placements.runtime.ledger import active_ledger
from placements.runtime.state import block_here, checkers, current, suspended
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.mesh import as_mesh


class Undeclared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Interrupted(BaseException):
    pass


TWO_RANKS = as_mesh({"tp": 2})


def snapshot() -> dict[Any, Any]:
    """What a block changes: every attribute that it replaces, and the state."""
    entries: dict[Any, Any] = {
        (p.owner, p.name): vars(p.owner).get(p.name) for p in patches._patches()
    }
    state = {
        "open": checkers.count,
        "block": block_here.get(),
        "shared": current.shared_axes,
        "mesh": current_mesh() if current_mesh() != TWO_RANKS else None,
        "ledger": active_ledger(),
        "policy": gradient_dtype("tp"),
    }
    return entries | state | dict(enumerate(_torch.modes()))


BEFORE = snapshot()


@pytest.fixture(autouse=True)
def on_two_ranks() -> Generator[None]:
    with set_current_mesh({"tp": 2}):
        yield
    assert_clean()


def changes(before: dict[Any, Any]) -> list[Any]:
    now = snapshot()
    return [key for key in before | now if before.get(key, now) is not now.get(key, before)]


def assert_clean() -> None:
    assert changes(BEFORE) == []


def assert_next_block_works() -> None:
    with typecheck():
        x = assert_type(torch.ones(2), {"tp": S(0)})
        assert type_of(x * 2) == {"tp": S(0)}
        with pytest.raises(PlacementError, match=r"Undeclared\.apply"):
            Undeclared.apply(x)
    assert_clean()


BLOCKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "typecheck": typecheck,
    "verify": verify,
    "ledger": ledger,
    "suspended": suspended,
    "shared_generator": lambda: shared_generator("tp"),
    "own_generator": lambda: own_generator("tp"),
}

# These hold as soon as they are made, with or without `with`.
AT_ONCE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "set_current_mesh": lambda: set_current_mesh({"tp": 4}),
    "set_gradient_dtype": lambda: set_gradient_dtype(torch.bfloat16),
}


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
        monkeypatch.setattr(_torch, "_works", set())
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


def test_what_is_done_together_runs_in_order() -> None:
    done: list[int] = []
    calls = together([partial(done.append, 1), partial(done.append, 2)])
    assert done == []
    calls()
    assert done == [1, 2]


def test_a_torch_that_lacks_something_is_one_clear_error(monkeypatch: Any) -> None:
    missing = _torch.Use("torch._C._gone", "do things", lambda: torch._C._gone)
    monkeypatch.setitem(_torch.PARTS, "checking", (missing, *_torch.CHECKING))
    monkeypatch.setattr(_torch, "_works", set())
    for make in (typecheck, verify):
        with pytest.raises(UnsupportedTorchError) as caught, make():
            raise AssertionError("entered")
        message = str(caught.value)
        assert f"torch {torch.__version__} is not supported" in message
        assert "torch._C._gone (to do things)" in message and "2.13.0" in message
        assert_clean()
    monkeypatch.undo()
    assert_next_block_works()


PUSH = "_push_on_torch_function_stack"


@pytest.mark.parametrize("owner, name, shown", [
    (_torch, "push_mode", PUSH), (_torch, "mode_at", PUSH),
    (_torch, "count_modes", PUSH), (_torch, "pop_mode", PUSH),
    (torch._C, "DisableTorchFunction", "DisableTorchFunction"),
    (torch.autograd.Function, "apply", "Function.apply"),
    (nn.Module, "register_buffer", "register_buffer"),
    (torch.distributed.distributed_c10d, "_object_to_tensor", "_object_to_tensor"),
    (torch.distributed.ProcessGroup, "allreduce", "ProcessGroup.allreduce"),
    (torch._C, "_current_graph_task_id", "_current_graph_task_id"),
    (torch._ops, "OpOverload", "OpOverload"),
])  # fmt: skip
def test_every_probe_can_fail(monkeypatch: Any, owner: Any, name: str, shown: str) -> None:
    monkeypatch.setattr(_torch, "_works", set())
    if owner is _torch:
        monkeypatch.setattr(owner, name, None)
    else:
        monkeypatch.delattr(owner, name)
    with pytest.raises(UnsupportedTorchError) as caught, typecheck():
        raise AssertionError("entered")
    assert shown in str(caught.value)
    monkeypatch.undo()
    assert_next_block_works()


def test_an_error_half_way_through_the_patches_undoes_the_others(monkeypatch: Any) -> None:
    plan = patches.Plan([], patches._patches())
    plan.install.insert(3, partial(setattr, int, "bit_length", None))  # it takes no patch
    monkeypatch.setattr(patches, "plan", lambda: plan)
    with pytest.raises(TypeError), typecheck():
        raise AssertionError("entered")
    assert_clean()
    monkeypatch.undo()
    assert_next_block_works()


def test_a_block_is_entered_once_at_a_time() -> None:
    block = typecheck()
    with block:
        with pytest.raises(RuntimeError, match="open already"), block:
            raise AssertionError("entered")
        assert current.mode is not None
    with block:
        assert current.mode is not None


def test_blocks_are_decorators_and_go_into_an_exit_stack() -> None:
    @typecheck()
    def recursive(n: int) -> Any:
        return current.mode if n == 0 else recursive(n - 1)

    assert recursive(2) is not None and current.mode is None
    with ExitStack() as stack:
        mode = stack.enter_context(typecheck())
        assert current.mode is mode
    assert current.mode is None


def test_an_error_inside_the_block_comes_out_as_it_is() -> None:
    for make in BLOCKS.values():
        with pytest.raises(KeyError, match="mine"), make():
            raise KeyError("mine")
        assert_clean()


def test_a_block_inside_an_error_handler_is_an_ordinary_block() -> None:
    try:
        raise KeyError("outer")
    except KeyError as outer:
        with verify():
            pass
        assert not getattr(outer, "__notes__", [])


def test_interleaved_tasks_keep_their_own_block() -> None:
    seen: dict[str, list[bool]] = {"a": [], "b": [], "none": []}

    async def checked(name: str, first: float, then: float) -> None:
        await asyncio.sleep(first)
        with typecheck():
            for _ in range(4):
                x = assert_type(torch.ones(2), {"tp": S(0)})
                await asyncio.sleep(then)
                seen[name].append(type_of(x * 2) == {"tp": S(0)})
                with pytest.raises(PlacementError):
                    Undeclared.apply(x)

    async def unchecked() -> None:
        for _ in range(6):
            await asyncio.sleep(0.004)
            seen["none"].append(current.mode is None and type_of(torch.ones(2) * 2) is None)
            Undeclared.apply(torch.ones(2))

    async def every() -> None:
        await asyncio.gather(checked("a", 0, 0.01), checked("b", 0.005, 0.012), unchecked())

    asyncio.run(every())
    assert seen == {"a": [True] * 4, "b": [True] * 4, "none": [True] * 6}


def test_a_task_that_opens_its_own_block_keeps_it_when_the_parent_leaves() -> None:
    async def child(left: asyncio.Event) -> bool:
        with typecheck():
            await left.wait()
            x = assert_type(torch.ones(2), {"tp": S(0)})
            return type_of(x + x) == {"tp": S(0)}

    async def child_without(left: asyncio.Event) -> bool:
        inherited = current.mode is not None
        await left.wait()
        return inherited and current.mode is None

    async def parent() -> list[bool]:
        left = asyncio.Event()
        with typecheck():
            tasks = [asyncio.create_task(c(left)) for c in (child, child_without)]
            await asyncio.sleep(0.01)
        assert current.mode is None and type_of(torch.ones(2) * 2) is None
        left.set()
        return list(await asyncio.gather(*tasks))

    assert asyncio.run(parent()) == [True, True]


def test_a_thread_that_gets_the_context_is_not_checked_by_halves() -> None:
    def work() -> tuple[bool, bool]:
        plain = current.mode is None and type_of(torch.ones(2) * 2) is None
        with typecheck():
            x = assert_type(torch.ones(2), {"tp": S(0)})
            return plain, type_of(x * 2) == {"tp": S(0)}

    async def main() -> tuple[bool, bool]:
        with typecheck():
            return await asyncio.to_thread(work)

    assert asyncio.run(main()) == (True, True)


def checked_steps() -> Generator[bool]:
    with typecheck():
        while True:
            x = assert_type(torch.ones(2), {"tp": S(0)})
            yield type_of(x * 2) == {"tp": S(0)}


def test_generators_may_be_left_in_any_order() -> None:
    first, second = checked_steps(), checked_steps()
    assert next(first) and next(second)
    first.close()
    assert next(second) and current.mode is not None
    with pytest.raises(PlacementError):
        Undeclared.apply(assert_type(torch.ones(2), {"tp": S(0)}))
    second.close()
    assert_clean()


def test_a_generator_that_is_finalised_in_another_thread_leaves_its_block_here_too() -> (
    None
):
    steps = [checked_steps()]
    assert next(steps[0]) and current.mode is not None

    def finalise() -> None:
        steps.clear()
        gc.collect()

    thread = threading.Thread(target=finalise)
    thread.start()
    thread.join()
    assert current.mode is None and checkers.count == 0
    Undeclared.apply(torch.ones(2))
    assert type_of(torch.ones(2) * 2) is None
    assert_next_block_works()  # and the mode is gone from the stack


def test_the_modes_of_others_stay_where_they_are() -> None:
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    steps = checked_steps()
    assert next(steps)
    with Doubling() as mode:
        steps.close()
        assert _torch.modes() == [mode]
    assert_clean()


def test_own_generator_goes_on_where_it_was() -> None:
    state = torch.get_rng_state()
    with contextlib.suppress(Interrupted), own_generator("tp"):
        torch.rand(3)
        raise Interrupted
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    torch.randint(1 << 62, ())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_two_interrupts_in_a_row_are_healed_by_the_next_block() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            checking, "_leaving", lambda block: 1 / 0
        )  # so that nothing is undone
        with pytest.raises(ZeroDivisionError), typecheck():
            pass
    assert changes(BEFORE) and current.mode is None
    assert_next_block_works()


def values() -> list[Any]:
    return [current_mesh(), active_ledger(), current.shared_axes, gradient_dtype("tp")]


HELD: dict[str, Callable[[int], AbstractContextManager[Any]]] = {
    "set_current_mesh": lambda k: set_current_mesh({"tp": k}),
    "set_gradient_dtype": lambda k: set_gradient_dtype(
        [torch.float32, torch.float64][k % 2]
    ),
    "ledger": lambda k: ledger(),
    "shared_generator": lambda k: shared_generator("tp"),
}


def held(name: str, k: int) -> Generator[list[Any]]:
    with HELD[name](k):
        while True:
            yield values()


@pytest.mark.parametrize("name", HELD)
def test_what_a_generator_holds_may_end_in_any_order(name: str) -> None:
    before = values()
    first, second = held(name, 3), held(name, 4)
    next(first)
    inside = next(second)
    first.close()
    assert next(second) == inside != before
    second.close()
    assert values() == before


@pytest.mark.parametrize("name", HELD)
def test_what_a_generator_holds_ends_with_it_in_another_thread(name: str) -> None:
    before, steps = values(), [held(name, 3)]
    assert next(steps[0]) != before
    thread = threading.Thread(target=lambda: (steps.clear(), gc.collect()))
    thread.start()
    thread.join()
    assert values() == before


def test_a_block_that_acts_at_once_can_be_entered_again_and_decorates_nothing() -> None:
    mesh = set_current_mesh({"tp": 3})
    for _ in range(2):
        with mesh:
            assert current_mesh() == as_mesh({"tp": 3})
        assert current_mesh() == TWO_RANKS
    with pytest.raises(TypeError, match="no decorator"):
        set_current_mesh({"tp": 3})(lambda: None)
    assert current_mesh() == TWO_RANKS


@pytest.mark.parametrize("name", BLOCKS | AT_ONCE)
def test_a_block_is_not_copied_and_has_no_truth_value(name: str) -> None:
    made = (BLOCKS | AT_ONCE)[name]()
    with made:
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError):
                copied(made)
        with pytest.raises(TypeError, match="no truth value"):
            bool(made)


def test_what_returns_before_its_body_runs_is_not_decorated() -> None:
    def generator() -> Generator[None]:
        yield

    async def coroutine() -> None: ...

    for function in (generator, coroutine):
        for block in (typecheck(), verify()):
            with pytest.raises(TypeError, match="returns before its body runs"):
                block(function)


@pytest.mark.parametrize("way", ["close", "exit", "end of a generator", "reraised"])
def test_verify_compares_if_and_only_if_its_block_comes_to_an_end(way: str) -> None:
    def program() -> None:
        mesh = device_mesh()
        with set_current_mesh(mesh):
            block = verify()
            stack = ExitStack()
            stack.enter_context(block)
            assert_type(torch.ones(2) + float(mesh.get_rank()), {"tp": R})  # a lie
            try:
                raise KeyError("mine")
            except KeyError as error:
                if way == "close":
                    stack.close()
                elif way == "exit":
                    block.__exit__(None, None, None)
                elif way == "reraised":
                    assert not block.__exit__(KeyError, error, None)
                else:
                    for _ in stepped(stack):
                        pass

    def stepped(stack: ExitStack) -> Generator[None]:
        with stack:
            yield

    if way == "reraised":
        run_ranks({"tp": 2}, program)
    else:
        with pytest.raises(RankFailure, match="is different on ranks 0 and 1"):
            run_ranks({"tp": 2}, program)
