"""Views to sizes that were read from pieces: each such size must be that of the cut dim."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from placements import (
    PlacementError,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)

View = Callable[[Tensor, Tensor], Tensor]


def view_of(view: View) -> Tensor:
    """x is 2 of 4 rows of 8, and w is 4 of 8 rows of 2."""
    x = assert_type(torch.randn(2, 8), {"a": S(0)})
    w = assert_type(torch.randn(4, 2), {"a": S(0)})
    return view(x, w)


@pytest.mark.parametrize(
    "view",
    [
        lambda x, w: x.reshape(x.shape[0], -1, x.shape[0]),
        lambda x, w: x.view(x.shape[0], -1, w.shape[0]),
        lambda x, w: x.unflatten(1, (x.shape[0], -1)),
        lambda x, w: x.unflatten(1, (-1, w.shape[0])),
        lambda x, w: x.view(x.shape[0], x.shape[0], 4),
        lambda x, w: x.reshape(x.shape[0] * 2, x.shape[0] * 2),
        lambda x, w: x.view(4, w.shape[0]),
    ],
)
def test_a_second_size_of_a_piece_is_refused(view: View) -> None:
    """On one device these sizes are twice as large, so the dims are other ones."""
    with set_current_mesh({"a": 2}), typecheck(), pytest.raises(PlacementError):
        view_of(view)


@pytest.mark.parametrize(
    "view",
    [
        lambda x, w: x.view(x.shape[0] * 2, 4),
        lambda x, w: x.view(x.shape[0], 2, -1),
        lambda x, w: x.view(w.shape[0], 4),
        lambda x, w: x.unflatten(1, (2, -1)),
        lambda x, w: x.view(x.shape),
    ],
)
def test_one_size_of_a_piece_is_the_cut_dim(view: View) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        found = type_of(view_of(view))
        assert found is not None and found["a"] == S(0)


def test_any_sizes_fit_rows_that_are_each_ranks_own() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 8), {"a": S(0)})
        own = assert_type(torch.randn(2, 8), {"a": V})
        assert type_of(own.view(x.shape[0], -1, x.shape[0])) == {"a": V}
