"""Integers that number the rows of a dim: what keeps this knowledge and what drops it."""

import pytest
import torch

from placements import (
    Even,
    Index,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    row_numbers,
    type_of,
)
from tests.support.checked import checked_on
from tests.support.checked import random_of as of

checked = checked_on(tp=4)


def test_an_index_is_kept_by_selection_and_dropped_by_arithmetic() -> None:
    scores = of(S(0), 6, 8)
    _, ids = scores.topk(2, dim=-1)
    for kept in (
        ids.reshape(-1),
        ids[:, 0],
        ids.sort(dim=-1).values,
        ids.clone(),
        ids.flip(1),
    ):
        known = type_of(kept)
        assert known is not None and known.index == Index(8)
    half = ids // 2
    with pytest.raises(PlacementError, match="arithmetic made this integer") as caught:
        scores.scatter(1, half, 0.0)
    assert caught.value.name == "half"
    told = assert_type(half, {"tp": S(0)}, index=Index(8))
    assert type_of(scores.scatter(1, told, 0.0)) == {"tp": S(0)}


def test_arithmetic_reads_rows_that_are_not_cut_and_writes_none() -> None:
    scores, table = of(S(0), 6, 8), of(R, 8, 4)
    _, ids = scores.topk(2, dim=-1)
    moved = (ids + 1) % 8
    assert type_of(table[moved]) == {"tp": S(0)}
    assert type_of(torch.nn.functional.embedding(moved, table)) == {"tp": S(0)}
    assert type_of(scores.gather(1, moved)) == {"tp": S(0)}
    assert type_of(scores.take_along_dim(moved, 1)) == {"tp": S(0)}
    for write in (
        lambda: table.index_add(0, moved.flatten(), of(S(0), 12, 4)),
        lambda: table.index_put((moved,), of(S(0), 6, 2, 4)),
        lambda: scores.scatter_add(1, moved, of(S(0), 6, 2)),
    ):
        with pytest.raises(PlacementError, match="arithmetic made this integer"):
            write()


def test_numbers_of_own_rows_are_pieces_as_an_index_and_nobodys_as_numbers() -> None:
    x = of(S(0), 6, 8)
    for rows in (row_numbers(x, 0), torch.arange(x.shape[0])):
        known = type_of(rows)
        assert known is not None and known == {"tp": S(0)}
        assert known.index == Index(Even(24), "tp")
        assert type_of(x[rows, 0]) == {"tp": S(0)}
        for number in (rows + 0, rows.sum(), rows < 2, rows.float().mean()):
            assert type_of(number) == {"tp": V}
        with pytest.raises(PlacementError, match="one rank's own rows"):
            of(R, 6, 4)[rows]
        with pytest.raises(PlacementError, match="one rank's own rows"):
            of(R, 12, 4)[rows]


def test_an_order_of_own_rows_is_an_index_of_them() -> None:
    x = of(S(0), 6, 8)
    ids = x.topk(2, dim=-1).indices.flatten()  # of 48 slots, 12 here
    order = ids.argsort()
    known = type_of(order)
    assert known is not None and known == {"tp": V}
    assert known.index == Index(Even(48), "tp")
    assert type_of(ids[order]) == {"tp": V}
    assert type_of(x[order // 2]) == {"tp": V}  # two slots for each token
    for wrong in (lambda: x[order], lambda: x[order // 3], lambda: x[order // 2 + 1]):
        with pytest.raises(PlacementError):
            wrong()
    summed = torch.zeros_like(x).index_add(0, order // 2, x[order // 2])
    assert type_of(summed) == {"tp": V}
    grouped, same = ids.sort()
    assert type_of(grouped) == {"tp": V} and type_of(same) == {"tp": V}
    for values in (lambda: x.sort(0), lambda: x.topk(2, dim=0), lambda: ids.topk(2)):
        with pytest.raises(PlacementError, match="order of the whole dim"):
            values()


def test_where_and_nonzero_count_the_rows_of_each_dim() -> None:
    mask = of(S(0), 6, 8) > 0
    rows, columns = torch.where(mask)
    assert type_of(rows) == {"tp": V} and type_of(columns) == {"tp": V}
    known = type_of(rows), type_of(columns)
    assert [t.index for t in known if t is not None] == [Index(Even(24), "tp"), Index(8)]
    assert type_of(of(S(0), 6, 8)[rows, columns]) == {"tp": V}
    assert type_of(of(R, 8, 4)[columns]) == {"tp": V}
    flat = mask.any(1).nonzero().flatten()
    assert type_of(of(S(0), 6, 4)[flat]) == {"tp": V}
    with pytest.raises(PlacementError, match="one rank's own rows"):
        of(R, 12, 4)[flat]


def test_an_index_of_other_rows_is_refused() -> None:
    scores, other = of(S(0), 6, 8), of(S(0), 6, 5)
    _, ids = other.topk(2, dim=-1)
    with pytest.raises(PlacementError, match="other rows"):
        scores.gather(1, ids)
