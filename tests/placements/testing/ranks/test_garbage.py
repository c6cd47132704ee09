"""Simulated ranks let Python search the whole program less often, and only meanwhile."""

import gc

import pytest

from placements.testing import run_ranks
from placements.testing.ranks.garbage import SEARCHES, seldom_searched


def thresholds() -> tuple[int, int, int]:
    return gc.get_threshold()


def test_ranks_are_searched_less_often_and_the_program_afterwards_as_before() -> None:
    before = gc.get_threshold()
    assert before[2] < SEARCHES
    assert run_ranks(2, thresholds) == [(*before[:2], SEARCHES)] * 2
    assert gc.get_threshold() == before


def test_an_error_leaves_no_trace() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), seldom_searched():
        raise KeyError
    assert gc.get_threshold() == before


def test_a_program_that_asks_for_fewer_searches_keeps_its_own_number() -> None:
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], 2 * SEARCHES)
    try:
        with seldom_searched():
            assert gc.get_threshold()[2] == 2 * SEARCHES
    finally:
        gc.set_threshold(*before)
