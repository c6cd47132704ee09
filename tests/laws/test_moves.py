"""Transitions: the value is kept and backward is the adjoint, for every row."""

import pytest
from hypothesis import given, settings

from placements.inference.transitions import TRANSITIONS, Transition, dual_transition
from placements.testing.laws.transitions_kept import (
    TransitionCase,
    check_transition,
    transition_cases,
)
from placements.types.axis import BY_LETTER, DUALS, Shard, dual

# The rows share the examples of a profile.
SHARE = len(TRANSITIONS)


def test_the_gradient_of_the_gradient_is_the_value() -> None:
    for t in [*BY_LETTER.values(), Shard(0), Shard(1)]:
        assert dual(dual(t)) == t
    assert set(DUALS) == set(BY_LETTER)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda r: f"{r.call}-{r.src}-{r.dst}")
def test_the_backward_of_the_backward_is_the_forward(row: Transition) -> None:
    back = dual_transition(dual_transition(row))
    assert (back.action, back.src, back.dst) == (row.action, row.src, row.dst)


@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda r: f"{r.call}-{r.src}-{r.dst}")
def test_transitions_keep_the_value_and_backward_is_adjoint(row: Transition) -> None:
    @settings(max_examples=max(settings().max_examples // SHARE, 50))
    @given(transition_cases(row=row))
    def law(case: TransitionCase) -> None:
        check_transition(case)

    law()
