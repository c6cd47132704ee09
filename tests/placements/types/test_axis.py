"""Types on one axis: values, equality, and the types of their gradients."""

import copy
import pickle

import pytest

from placements import (
    Even,
    I,
    Invariant,
    P,
    Padded,
    Partial,
    R,
    Replicate,
    S,
    Shard,
    V,
    Varying,
)
from placements.types.axis import AxisType, dual
from placements.types.text import as_axis_type
from tests.support.axis_types import ALL


def test_words_and_letters_are_the_same_values() -> None:
    assert (Replicate(), Invariant(), Varying(), Partial()) == (R, I, V, P)
    assert Replicate() is R
    assert S is Shard
    assert [as_axis_type(w) for w in (Replicate, Invariant, Varying, Partial)] == [
        R,
        I,
        V,
        P,
    ]


@pytest.mark.parametrize("t", ALL, ids=repr)
def test_the_gradient_of_the_gradient_type_is_the_type(t: AxisType) -> None:
    assert dual(dual(t)) == t


def test_gradient_types() -> None:
    assert [dual(t) for t in (R, I, V, P, S(1))] == [P, I, V, R, S(1)]


@pytest.mark.parametrize("t", ALL, ids=repr)
def test_types_survive_copies(t: AxisType) -> None:
    assert copy.deepcopy(t) == t
    assert pickle.loads(pickle.dumps(t)) == t


def test_a_shard_without_an_extent_equals_any_of_its_dim() -> None:
    assert S(0) == S(0, Padded(5))
    assert S(0, Even(4)) != S(0, Padded(5))
    assert S(0) != S(1)
    assert S(0) != V
