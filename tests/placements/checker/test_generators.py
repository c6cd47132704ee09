"""`own_generator` and `shared_generator`: whose numbers the ranks draw."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

from placements import (
    PlacementError,
    R,
    S,
    V,
    assert_type,
    axis_rank,
    own_generator,
    set_current_mesh,
    shared_generator,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks

AXES = {"dp": 2, "tp": 2}


@pytest.mark.parametrize("context", [own_generator, shared_generator])
def test_our_own_contexts_cannot_be_lost(context: Any) -> None:
    with pytest.raises(TypeError, match="with a, b:"):
        with context("tp") and nullcontext():
            pass


def masks() -> tuple[list[Tensor], list[Tensor], Tensor]:
    with set_current_mesh(device_mesh()):
        before = torch.rand(2)
        with own_generator("tp"):
            first = torch.rand(8)
        with own_generator("tp"):
            second = torch.rand(8)
        return [first, second], [before, torch.rand(2)], torch.rand(1)


def test_own_generators_differ_on_their_axis_and_from_each_other() -> None:
    ranks = run_ranks(AXES, masks)
    (first, second), shared, after = ranks[0]
    assert not torch.equal(first, second)
    assert not torch.equal(first, ranks[1][0][0])  # another place on tp
    assert torch.equal(first, ranks[2][0][0])  # the same one, on another dp rank
    for _, others, last in ranks[1:]:
        # Outside the blocks the ranks are in step again.
        assert torch.equal(last, after)
        assert all(torch.equal(a, b) for a, b in zip(others, shared, strict=True))


def test_own_generator_takes_back_a_shared_claim() -> None:
    with set_current_mesh({"tp": 2}), typecheck(), shared_generator("tp"):
        x = assert_type(torch.ones(4), {"tp": S(0)})
        with pytest.raises(PlacementError, match="share a generator"):
            dropout(x, 0.5)
        with own_generator("tp"):
            assert type_of(dropout(x, 0.5)) == {"tp": S(0)}
        with pytest.raises(PlacementError, match="share a generator"):
            dropout(x, 0.5)


def test_a_context_may_decorate_a_function() -> None:
    @shared_generator("tp")
    def noisy(x: Tensor) -> Tensor:
        return dropout(x, 0.5)

    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.ones(4), {"tp": R})
        assert [type_of(noisy(x)), type_of(noisy(x))] == [{"tp": R}] * 2
        assert type_of(dropout(x, 0.5)) == {"tp": V}


def test_own_generator_on_one_device_and_with_checking_off() -> None:
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    with own_generator("tp"):
        torch.rand(3)
    torch.random.set_rng_state(state)
    int(torch.randint(1 << 62, ()))
    expected = torch.rand(2)
    torch.random.set_rng_state(state)
    with own_generator("tp"):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)


def test_a_generator_of_the_programs_own_is_not_said_to_be_shared() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        mine = torch.Generator()
        mine.manual_seed(axis_rank("a"))
        x = assert_type(torch.ones(4), {"a": R})
        with shared_generator("a"):
            for draw in (
                lambda: torch.bernoulli(x * 0.5, generator=mine),
                lambda: torch.randn(3, generator=mine),
                lambda: torch.zeros(3).normal_(generator=mine),
            ):
                with pytest.raises(PlacementError, match="default generators"):
                    draw()
            assert type_of(torch.bernoulli(x * 0.5)) == {"a": R}
        assert type_of(torch.randn(3, generator=mine)) == {"a": V}
