"""Equal splits: padding by hand, and the laws of padding and cutting."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from spmd_moe.paths.equal_split import Exchange, compact, pad
from spmd_moe.paths.recorder import recording

ROWS = torch.arange(1.0, 6.0).unsqueeze(1)  # rows 0..4 hold 1..5, so that 0 is padding


@pytest.mark.parametrize(
    ("splits", "size", "padded"),
    [
        ([2, 1, 2], 2, [1, 2, 3, 0, 4, 5]),
        ([0, 5], 5, [0, 0, 0, 0, 0, 1, 2, 3, 4, 5]),
        ([5, 0], 6, [1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_zero_rows_come_at_the_end_of_a_split(
    splits: list[int], size: int, padded: list[int]
) -> None:
    found = pad(ROWS, splits, size)
    assert found.flatten().tolist() == padded
    assert torch.equal(compact(found, splits, size), ROWS)


def test_equal_splits_are_left_as_they_are() -> None:
    assert pad(ROWS[:4], [2, 2], 2).data_ptr() == ROWS.data_ptr()
    rows = ROWS[:4]
    assert pad(rows, [2, 2], 2) is rows and compact(rows, [2, 2], 2) is rows


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(0, 3))
@settings(deadline=None)
def test_cutting_undoes_padding_and_each_is_the_backward_of_the_other(
    splits: list[int], more: int
) -> None:
    size = max(splits) + more
    rows = torch.randn(sum(splits), 2, dtype=torch.float64, requires_grad=True)
    padded = pad(rows, splits, size)
    assert padded.shape[0] == size * len(splits)
    assert torch.equal(compact(padded, splits, size), rows)
    gradient = torch.randn_like(padded)
    (padded * gradient).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, compact(gradient, splits, size))
    wide = gradient.clone().requires_grad_()
    (compact(wide, splits, size) * rows.detach()).sum().backward()
    assert wide.grad is not None
    assert torch.equal(wide.grad, pad(rows.detach(), splits, size))


def test_one_exchange_serves_both_directions() -> None:
    exchange = Exchange([2, 1], [1, 2], size=2)
    with recording() as recorder:
        out = exchange.before(ROWS[:3], out=True)
        assert out.flatten().tolist() == [1, 2, 3, 0]
        assert exchange.sizes(out=True) == exchange.sizes(out=False) == (None, None)
        assert exchange.after(ROWS[:4], out=True).flatten().tolist() == [1, 3, 4]
        assert exchange.before(ROWS[:3], out=False).flatten().tolist() == [1, 0, 2, 3]
        assert exchange.after(ROWS[:4], out=False).flatten().tolist() == [1, 2, 3]
    assert recorder.counts() == {
        "equal_split_combine": 1, "equal_split_combine_padding": 1,
        "equal_split_dispatch": 1, "equal_split_dispatch_padding": 1,
    }  # fmt: skip
    plain = Exchange([2, 1], [1, 2])
    assert plain.before(ROWS, out=True) is ROWS is plain.after(ROWS, out=False)
    assert plain.sizes(out=True) == ([2, 1], [1, 2])
    assert plain.sizes(out=False) == ([1, 2], [2, 1])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, but \\[3, -1\\] rows are to go"):
        Exchange([3, -1], [1, 1])
    with pytest.raises(ValueError, match="equal splits of 2 rows must hold every split"):
        Exchange([3, 1], [1, 1], size=2)
    with pytest.raises(ValueError, match="5 rows, but splits \\[2, 2\\] have 4"):
        pad(ROWS, [2, 2], 3)
    with pytest.raises(ValueError, match="5 rows, but 2 splits of 3 have 6"):
        compact(ROWS, [3, 2], 3)
