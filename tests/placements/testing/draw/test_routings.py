"""The strategy of routings: what it draws is valid, and the hard cases are among it."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import find, given, settings

from placements.testing.draw.routings import DrawnRouting, routings


@given(routings())
def test_routings_are_valid(routing: DrawnRouting) -> None:
    ids_TK, gates_TK = routing.expert_ids_TK, routing.gates_TK
    assert ids_TK.shape == gates_TK.shape == (routing.num_tokens, routing.top_k)
    assert 1 <= routing.top_k <= routing.num_experts
    for ids_K in ids_TK.tolist():
        assert len(set(ids_K)) == routing.top_k
        assert all(0 <= expert < routing.num_experts for expert in ids_K)
    assert bool((gates_TK >= 0).all())
    assert torch.equal(gates_TK.sum(1), torch.ones(routing.num_tokens).double())
    flat = ids_TK.flatten().tolist()
    assert routing.counts_E.tolist() == [flat.count(e) for e in range(routing.num_experts)]


@given(
    routings(
        min_tokens=2, max_tokens=3, min_experts=3, max_experts=9,
        min_top_k=2, max_top_k=3, multiple_of=4,
    )
)  # fmt: skip
def test_bounds_are_kept(routing: DrawnRouting) -> None:
    assert routing.num_tokens in (2, 3)
    assert routing.num_experts in (4, 8)
    assert routing.top_k in (2, 3)


def skewed(routing: DrawnRouting) -> bool:
    """One expert has most of the tokens, and another one has few."""
    counts = sorted([0, *routing.counts_E.tolist()])
    return counts[-1] > 2 * counts[-2] > 0


HARD: dict[str, Callable[[DrawnRouting], bool]] = {
    "no tokens": lambda r: r.num_tokens == 0,
    "an empty expert": lambda r: r.num_tokens > 3 and 0 in r.counts_E.tolist(),
    "all tokens to one expert": lambda r: (
        r.num_tokens > 3
        and r.num_experts > 2
        and r.counts_E.tolist().count(0) == r.num_experts - 1
    ),
    "every token to every expert": lambda r: (
        r.num_tokens > 1 and r.top_k == r.num_experts > 2
    ),
    "skewed": skewed,
    "a gate that is zero": lambda r: bool((r.gates_TK == 0).any()),
}


@pytest.mark.parametrize("what", HARD)
def test_hard_cases_are_drawn_often(what: str) -> None:
    seen: list[bool] = []

    @settings(max_examples=200, derandomize=True, database=None, deadline=None)
    @given(routings())
    def count(routing: DrawnRouting) -> None:
        seen.append(HARD[what](routing))

    count()
    assert sum(seen) >= 4, f"{sum(seen)} of {len(seen)}"


def test_they_shrink_to_one_expert_and_few_tokens() -> None:
    few = settings(max_examples=50, database=None, deadline=None)
    least = find(routings(), lambda _: True, settings=few)
    assert (least.num_tokens, least.num_experts, least.top_k) == (0, 1, 1)
    one = find(routings(), lambda r: r.num_tokens > 0, settings=few)
    assert one.expert_ids_TK.tolist() == [[0]] and one.gates_TK.tolist() == [[1.0]]


def test_the_repr_shows_the_draw() -> None:
    drawn = DrawnRouting(3, torch.tensor([[2, 0]]), torch.tensor([[0.25, 0.75]]))
    assert repr(drawn) == (
        "DrawnRouting(num_tokens=1, num_experts=3, top_k=2, "
        "expert_ids_TK=[[2, 0]], gates_TK=[[0.25, 0.75]])"
    )


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"min_tokens": -1}, "tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "tokens"),
        ({"min_experts": 0}, "experts"),
        ({"min_experts": 9}, "experts"),
        ({"min_top_k": 0}, "top_k"),
        ({"min_top_k": 3, "max_top_k": 2}, "top_k"),
        ({"min_top_k": 7}, "top_k"),
        ({"multiple_of": 0}, "multiple_of"),
        ({"multiple_of": 7}, "no multiple of 7"),
        ({"min_experts": 5, "max_experts": 7, "multiple_of": 4}, "no multiple of 4"),
    ],
)
def test_bad_bounds_are_refused(bounds: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        routings(**bounds)
