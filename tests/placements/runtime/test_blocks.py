"""Entering and leaving a block is atomic, whatever raises; tasks and generators keep theirs."""

import contextlib
import copy
import pickle
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # whose stance a block replaces, too

from placements import (
    R,
    _torch,
    assert_type,
    current_mesh,
    own_generator,
    set_current_mesh,
    typecheck,
    verify,
)
from placements.checker import patches
from placements.runtime.blocks import together
from placements.runtime.state import current
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.mesh import as_mesh
from tests.support.blocks import (
    AT_ONCE,
    BLOCKS,
    TWO_RANKS,
    Interrupted,
    assert_clean,
    assert_next_block_works,
    checked_steps,
)
from tests.support.blocks import on_two_ranks as on_two_ranks


def test_what_is_done_together_runs_in_order() -> None:
    done: list[int] = []
    calls = together([partial(done.append, 1), partial(done.append, 2)])
    assert done == []
    calls()
    assert done == [1, 2]


def test_an_error_half_way_through_the_patches_undoes_the_others(monkeypatch: Any) -> None:
    plan = patches.Replacements([], patches._patches())
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
            assert_type(torch.ones(2) + [0.0, 1.0][mesh.get_rank()], {"tp": R})  # a lie
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
