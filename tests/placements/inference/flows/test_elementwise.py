"""Elementwise flows: what is filled into an index, and pieces that are copied."""

import pytest
import torch

from placements import (
    Even,
    Index,
    Mesh,
    P,
    Padded,
    PlacementError,
    S,
    V,
    assert_type,
    axis_rank,
    set_current_mesh,
    type_of,
    typecheck,
)


def test_a_number_filled_into_an_index_of_own_rows_is_no_own_row() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        i = assert_type(torch.tensor([0, 1]), {"a": S(0)}, index=Index(Even(4), "a"))
        x = assert_type(torch.ones(2, 3), {"a": S(0)})
        assert type_of(x[i]) == {"a": S(0)}
        for chosen in (i.masked_fill(i > 0, 0), torch.where(i > 0, i, 0)):
            with pytest.raises(PlacementError):
                x[chosen]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_that_repeats_the_one_row_of_another_rank_is_refused_by_all(
    rank: int,
) -> None:
    """Of 3 rows rank 0 has 2, which fit; the one of rank 1 would be written twice."""
    with set_current_mesh(Mesh({"a": 2}, {"a": rank})), typecheck():
        x = assert_type(torch.ones(2), {"a": V})
        y = assert_type(torch.ones(2 - rank), {"a": S(0, Padded(3))})
        with pytest.raises(PlacementError, match="would be repeated"):
            x.copy_(y)
        z = assert_type(torch.zeros(2 - rank), {"a": S(0, Padded(3))})
        assert type_of(z.copy_(y)) == {"a": S(0, Padded(3))}


def test_a_number_is_copied_as_it_is_filled() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.ones(2, 3), {"a": S(0)})
        x.copy_(2.0)  # pyright: ignore[reportArgumentType]
        assert type_of(x) == {"a": S(0)}
        p = assert_type(torch.ones(2, 3), {"a": P})
        p.copy_(0.0)  # pyright: ignore[reportArgumentType]
        with pytest.raises(PlacementError, match="counted once per rank"):
            p.copy_(2.0)  # pyright: ignore[reportArgumentType]
        with pytest.raises(PlacementError):
            x.copy_(axis_rank("a"))  # pyright: ignore[reportArgumentType]
        buffer = torch.zeros(x.shape)
        buffer.copy_(2.0)  # pyright: ignore[reportArgumentType]
        assert type_of(buffer) == {"a": S(0)}
