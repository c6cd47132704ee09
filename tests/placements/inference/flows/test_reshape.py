"""Views to sizes that were read from pieces: each such size must be that of the cut dim."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from placements import (
    Padded,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.types.mesh import Mesh

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


# Views of x and of y; a has no rows of them on some ranks, and x is also cut over b.
WITHOUT_ROWS: dict[str, tuple[View, bool]] = {
    "flatten(1)": (lambda x, y: x.flatten(1), True),
    "flatten(1), back": (lambda x, y: x.flatten(1).unflatten(1, (-1, 2)), True),
    "unflatten": (lambda x, y: x.unflatten(1, (-1, 1)), True),
    "of no elements": (lambda x, y: y[:, 3:].unflatten(0, (-1, 1)), True),
    "rows first": (lambda x, y: y.view(-1, 3), True),
    "one more dim": (lambda x, y: y.view(-1, 1, 3), True),
    "a plain size": (lambda x, y: y[:, 0].reshape(1), False),
    "a plain size of none": (lambda x, y: y[:, 0].reshape(0), False),
    "too many elements": (lambda x, y: y[:, 3:].reshape(y.shape[0], 1), False),
    "too few elements": (lambda x, y: y[:, 0].view(y.shape[0], 0), False),
    "rows of nothing": (lambda x, y: y[:, 3:].unflatten(0, (y.shape[0], 0)), False),
    "-1 beside none": (lambda x, y: y.view(y.shape[0], -1), False),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_ranks_with_and_without_rows_say_the_same(name: str) -> None:
    """One row over two ranks: the second has none, and cannot tell where it would go."""
    view, is_accepted = WITHOUT_ROWS[name]
    said: set[str] = set()
    for a in range(2):
        coordinate = {"a": a, "b": 0}
        with set_current_mesh(Mesh({"a": 2, "b": 2}, coordinate)), typecheck():
            x = assert_type(torch.randn(1 - a, 2, 2), {"a": S(0, Padded(1)), "b": S(1)})
            y = assert_type(torch.randn(1 - a, 3), {"a": S(0, Padded(1)), "b": R})
            try:
                said.add(str(type_of(view(x, y))))
            except PlacementError:
                said.add("refused")
    assert len(said) == 1 and ("refused" not in said) == is_accepted


def test_numbers_of_a_view_of_nothing_are_those_of_one_device() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(0, 1), {"a": S(1)})  # 1 of 2 columns
        found = type_of(x.reshape(x.shape[0], 1))
        assert found is not None and found.global_shape((0, 1)) == (0, 1)
        assert type_of(x.reshape(x.shape[0], x.shape[1])) == {"a": S(1)}
