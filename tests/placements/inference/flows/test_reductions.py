"""Rows that are rolled: a dim that is cut keeps its cut only if nothing moves."""

from typing import Any

import pytest
import torch

from placements import (
    PlacementError,
    S,
    assert_type,
    axis_rank,
    set_current_mesh,
    type_of,
    typecheck,
)


@pytest.mark.parametrize("shifts", [(0, 0), ((0, 0), (0, 1)), (0,)])
def test_a_roll_by_nothing_keeps_a_cut(shifts: Any) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        assert type_of(x.roll(*shifts)) == {"a": S(0)}


@pytest.mark.parametrize("shifts", [(1, 0), ((0, 1), (1, 0)), (1,)])
def test_a_roll_of_a_cut_dim_is_refused(shifts: Any) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        with pytest.raises(PlacementError, match="change places"):
            x.roll(*shifts)
        with pytest.raises(PlacementError):
            x.roll(axis_rank("a"), 0)
