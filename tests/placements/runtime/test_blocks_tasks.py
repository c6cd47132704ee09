"""Tasks, threads and generators keep the blocks that they opened."""

import asyncio
import gc
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch._dynamo  # whose stance a block replaces, too

from placements import (
    PlacementError,
    S,
    assert_type,
    current_mesh,
    ledger,
    set_current_mesh,
    set_gradient_dtype,
    shared_generator,
    type_of,
    typecheck,
)
from placements.collectives.precision import gradient_dtype
from placements.runtime.ledger import active_ledger
from placements.runtime.state import checkers, current
from tests.support.blocks import (
    Undeclared,
    assert_clean,
    assert_next_block_works,
    checked_steps,
)
from tests.support.blocks import on_two_ranks as on_two_ranks


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
