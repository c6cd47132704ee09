"""Pieces seen as own rows and back, and what the layer needs of the type layer for it."""

import pytest
import torch

from placements import (
    Even,
    Folded,
    Index,
    Mesh,
    Padded,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    reinterpret,
    set_current_mesh,
    to_global,
    type_of,
    typecheck,
)
from placements.collectives.rows import row_numbers
from spmd_moe.paths.own import own_rows, pieces_like

MESH = Mesh({"dp": 2, "cp": 2, "tp": 2}, {"dp": 1, "cp": 0, "tp": 1})
PLACED = {"dp": S(0), "cp": S(1, Padded(5)), "tp": S(1, Padded(3))}  # 1 of 3 of 5


def test_nested_pieces_are_forgotten_and_claimed_again() -> None:
    with set_current_mesh(MESH), typecheck():
        x_TD = assert_type(torch.randn(2, 1, 4), PLACED).flatten(0, 1)
        own = own_rows(x_TD)
        assert type_of(own) == {"dp": V, "cp": V, "tp": V}
        again = pieces_like(own, x_TD)
        assert type_of(again) == type_of(x_TD)


def test_replicated_axes_stay_replicated() -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.randn(2, 4), {"dp": S(0), "tp": R})
        assert type_of(own_rows(x)) == {"dp": V, "tp": R}


def test_an_inner_cut_cannot_be_forgotten_before_the_outer() -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.randn(3, 4), {"dp": S(0), "tp": S(0)})
        with pytest.raises(PlacementError, match="forget the outer cut first"):
            reinterpret(x, "tp", src=S(0), dst=V)


def test_a_claimed_cut_goes_outside_the_cuts_that_are_there() -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.randn(3, 4), {"dp": V, "tp": S(0, Padded(5))})
        y = reinterpret(x, "dp", src=V, dst=S(0, Even(10)))
        assert type_of(y) == {"dp": S(0, Even(10)), "tp": S(0, Padded(5))}
        with pytest.raises(PlacementError, match="the dim has 5"):
            reinterpret(x, "dp", src=V, dst=S(0, Even(6)))


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_view_as_undoes_a_flatten_that_sizes_alone_do_not_tell(
    batch: int, length: int
) -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        placed = {"dp": S(0), "tp": S(1, Even(2 * length))}
        x = assert_type(torch.randn(batch, length, 3), placed)
        y_TD = x.flatten(0, 1) * 2
        assert type_of(y_TD.view_as(x)) == type_of(x)


def test_a_view_of_one_dim_leaves_uneven_pieces_of_another_alone() -> None:
    """As attention cuts channels into heads beside a sequence in uneven pieces."""
    with set_current_mesh({"cp": 2, "tp": 2}), typecheck():
        x_BLC = assert_type(torch.randn(2, 4, 6), {"cp": S(1, Padded(7)), "tp": S(2)})
        x_BLJA = torch.unflatten(x_BLC, 2, (-1, 2))
        assert type_of(x_BLJA) == {"cp": S(1, Padded(7)), "tp": S(2, Even(6))}
        assert type_of(x_BLJA.flatten(2)) == type_of(x_BLC)


def test_a_view_of_nothing_is_cut_as_the_sizes_say_that_were_read() -> None:
    with set_current_mesh({"dp": 2}), typecheck():
        x = assert_type(torch.randn(3, 0, 8), {"dp": S(0)})
        y_TD = x.flatten(0, 1)
        assert type_of(y_TD.view(x.shape[0], 0, 8)) == {"dp": S(0, Even(6))}
        with pytest.raises(PlacementError, match="cut dim apart"):
            y_TD.view(3, 0, 8)  # no size says that 3 is this rank's piece of 6


def test_global_rows_of_one_axis_stay_own_rows_of_the_others() -> None:
    with set_current_mesh(MESH), typecheck():
        x_TD = assert_type(torch.randn(2, 1, 4), PLACED).flatten(0, 1)
        rows_T = to_global(row_numbers(x_TD, 0), "tp", Folded(2, Padded(3)))
        assert rows_T.tolist() == [2, 5]
        known, x_type = type_of(rows_T), type_of(x_TD)
        assert known is not None and x_type is not None
        assert known.index == Index.of_cuts(x_type.cuts(0)[:-1])
