"""Random state, shared or per rank: verify() compares it with what the program says."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import dropout

from placements import (
    PlacementError,
    R,
    S,
    V,
    assert_type,
    own_generator,
    set_current_mesh,
    shared_generator,
    type_of,
    verify,
)
from placements.testing import device_mesh, run_ranks

AXES = {"dp": 2, "tp": 2}


def piece(rows: int = 4) -> Tensor:
    return assert_type(torch.ones(rows, 3), {"dp": R, "tp": S(0)})


def whole() -> Tensor:
    return assert_type(torch.ones(4, 3), {"dp": R, "tp": R})


def verified(fn: Callable[[], Any]) -> tuple[Any, ...]:
    with set_current_mesh(device_mesh()):
        try:
            with verify():
                fn()
        except PlacementError as error:
            return error.where, error.name, error.axis, str(error)
    return ()


def found(fn: Callable[[], Any], backend: Any = "sim") -> tuple[Any, ...]:
    ranks = run_ranks(AXES, verified, fn, backend=backend)
    assert all(rank == ranks[0] for rank in ranks), "all ranks report the same"
    return ranks[0]


def one_state_for_pieces() -> None:
    """B68: the ranks were seeded alike and mask different tokens."""
    x_TD = piece()
    with shared_generator("dp"):
        dropout(x_TD, 0.5)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_equal_numbers_for_different_rows_are_found(backend: str) -> None:
    where, name, axis, text = found(one_state_for_pieces, backend)
    assert where.startswith("dropout at test_random_state.py:")
    assert (name, axis) == ("x_TD", "tp")
    assert "ranks 0 and 1 of axis 'tp' draw the same numbers for x_TD" in text
    assert "own_generator('tp')" in text and "torch.manual_seed(seed + rank)" in text


def own_state_for_pieces() -> None:
    with shared_generator("dp"), own_generator("tp"):
        dropout(piece(), 0.5)
        dropout(piece(), 0.5)
    with shared_generator("dp", "tp"):
        dropout(whole(), 0.5)


def seeded_apart() -> None:
    torch.manual_seed(dist.get_rank() + 7)
    dropout(piece(), 0.5)
    torch.bernoulli(piece() * 0.5)
    torch.rand_like(piece())


@pytest.mark.parametrize("program", [own_state_for_pieces, seeded_apart])
def test_numbers_of_each_rank_for_different_rows_pass(program: Callable[[], None]) -> None:
    assert found(program) == ()


def shared_but_seeded_apart() -> None:
    torch.manual_seed(dist.get_rank() % 2)
    x_TD = whole()
    with shared_generator("dp", "tp"):
        dropout(x_TD, 0.5)


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_shared_generator_that_is_not_shared_is_found(backend: str) -> None:
    where, name, axis, text = found(shared_but_seeded_apart, backend)
    assert where.startswith("dropout at") and (name, axis) == ("x_TD", "tp")
    assert "shared_generator('tp') says that they draw the same" in text


def out_of_step() -> None:
    """Seeded alike, but one rank has drawn once more."""
    if dist.get_rank() == 1:
        torch.rand(1)
    with shared_generator("dp", "tp"):
        torch.rand(3)


def test_generators_that_went_out_of_step_are_found() -> None:
    assert found(out_of_step)[0].startswith("rand at")


def generator_argument() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(dist.get_rank())
    torch.bernoulli(piece() * 0.5, generator=generator)


def test_the_generator_that_the_op_uses_is_compared() -> None:
    assert found(generator_argument)[0].startswith("bernoulli at")


def replicate_in_one_state() -> None:
    dropout(whole(), 0.5)


def test_equal_numbers_that_nobody_said_are_found() -> None:
    text = found(replicate_in_one_state)[3]
    assert "which is Replicate there" in text and "shared_generator('dp')" in text


def nothing_is_drawn() -> None:
    dropout(piece(), 0.0)
    dropout(piece(), 0.5, training=False)
    torch.nn.Dropout(0.5).eval()(piece())
    dropout(piece(0), 0.5)
    x = assert_type(torch.randn(3), {"dp": V, "tp": V})  # fresh, and then declared
    assert type_of(x) is not None


def test_what_draws_nothing_claims_nothing() -> None:
    assert found(nothing_is_drawn) == ()


@contextmanager
def someone_elses_fork() -> Any:
    with own_generator("dp", "tp"):
        yield


def lost_context() -> None:
    with someone_elses_fork() and nullcontext():
        dropout(piece(), 0.5)


def test_a_context_that_was_lost_is_found() -> None:
    assert found(lost_context)[0].startswith("dropout at")
