"""Extents: the tables of the seeds, and that rows are numbered one to one."""

import pytest
import torch

from placements import Even, Folded, Padded, Ragged
from placements.extents import Extent

# B, L, ranks | stride, valid, start, rows of a padded piece: seeds 2.4
UNEVEN = [
    (1, 5, 2, 3, [3, 2], [0, 3], 3),
    (2, 5, 2, 3, [3, 2], [0, 3], 6),
    (1, 7, 4, 2, [2, 2, 2, 1], [0, 2, 4, 6], 2),
    (2, 7, 4, 2, [2, 2, 2, 1], [0, 2, 4, 6], 4),
    (1, 1, 4, 1, [1, 0, 0, 0], [0, 1, 1, 1], 1),
    (1, 3, 4, 1, [1, 1, 1, 0], [0, 1, 2, 3], 1),
    (1, 5, 4, 2, [2, 2, 1, 0], [0, 2, 4, 5], 2),
    (1, 9, 4, 3, [3, 3, 3, 0], [0, 3, 6, 9], 3),
    (2, 6, 4, 2, [2, 2, 2, 0], [0, 2, 4, 6], 4),
    (1, 8, 4, 2, [2, 2, 2, 2], [0, 2, 4, 6], 2),
    (2, 0, 2, 0, [0, 0], [0, 0], 0),
]


@pytest.mark.parametrize(
    ("b", "length", "ranks", "stride", "valid", "start", "padded"), UNEVEN
)
def test_padded_pieces_are_those_of_the_seed(
    b: int,
    length: int,
    ranks: int,
    stride: int,
    valid: list[int],
    start: list[int],
    padded: int,
) -> None:
    extent = Padded(length).over(ranks)
    assert [extent.local_size(r) for r in range(ranks)] == valid
    assert [extent.offset(r) for r in range(ranks)] == start
    assert max(extent.sizes) == stride
    assert b * stride == padded
    assert sum(extent.sizes) == length


# B, L, ranks -> the global rows of every rank's local rows: seeds 1.4 and 2.4
FOLDED = [
    (2, 4, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (3, 6, 3, [[0, 1, 6, 7, 12, 13], [2, 3, 8, 9, 14, 15], [4, 5, 10, 11, 16, 17]]),
    (2, 5, 2, [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]),
    (1, 6, 2, [[0, 1, 2], [3, 4, 5]]),
    (4, 3, 1, [list(range(12))]),
]


@pytest.mark.parametrize(("b", "length", "ranks", "rows"), FOLDED)
def test_folded_rows_are_those_of_the_seed(
    b: int, length: int, ranks: int, rows: list[list[int]]
) -> None:
    extent = Folded(b, Padded(length)).over(ranks)
    assert [extent.rows(r) for r in range(ranks)] == rows


def test_the_last_rank_of_seven_rows_over_four_is_decoded_by_its_own_length() -> None:
    # Upstream decodes with the padded length and says 7.
    assert Folded(2, Padded(7)).over(4).to_global(1, 3) == 13


EXTENTS: list[Extent] = [
    Even(12).over(4),
    Even(0).over(3),
    Padded(7).over(4),
    Padded(2).over(4),
    Ragged(3, 0, 2, 1),
    Ragged(0, 0),
    Folded(3, Even(8)).over(2),
    Folded(2, Padded(5)).over(2),
    Folded(2, Padded(2)).over(4),
    Folded(2, Ragged(3, 0, 2)),
]


@pytest.mark.parametrize("extent", EXTENTS, ids=repr)
def test_every_global_row_is_held_once_and_found_again(extent: Extent) -> None:
    held = [extent.rows(r) for r in range(extent.bound_ranks)]
    assert sorted(row for rows in held for row in rows) == list(range(extent.total))
    for rank, rows in enumerate(held):
        for index, row in enumerate(rows):
            assert extent.to_local(row) == (rank, index)


@pytest.mark.parametrize("extent", EXTENTS, ids=repr)
def test_integer_tensors_are_mapped_like_numbers(extent: Extent) -> None:
    for rank in range(extent.bound_ranks):
        index = torch.arange(extent.local_size(rank))
        assert extent.to_global(index, rank).tolist() == extent.rows(rank)
    ranks, indices = (
        extent.to_local(torch.arange(extent.total)) if extent.total else ([], [])
    )
    expected = [extent.to_local(row) for row in range(extent.total)]
    assert list(zip(map(int, ranks), map(int, indices), strict=True)) == expected


def test_extents_are_equal_when_every_rank_holds_the_same_rows() -> None:
    assert Padded(8).over(4) == Even(8).over(4)
    assert Ragged(3, 2) == Padded(5)
    assert Ragged(2, 2) == Even(4)
    assert Folded(1, Padded(5)).over(2) == Padded(5).over(2)
    assert Folded(2, Folded(3, Even(4))) == Folded(6, Even(4))
    assert Padded(5).over(2) != Padded(5).over(3)
    assert Folded(2, Even(4)).over(2) != Even(8).over(2)
    assert Even(8) != Padded(7).over(4)


def test_scaling_and_dividing_are_inverse() -> None:
    for extent in EXTENTS:
        assert extent.scaled(3).divided(3) == extent
    assert Padded(5).over(2).divided(2) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Even(5).over(2), "write Padded(5)"),
        (lambda: Even(-1), "at least 0"),
        (lambda: Padded(-1), "at least 0"),
        (lambda: Ragged(), "one size"),
        (lambda: Ragged(1, -1), "at least 0"),
        (lambda: Folded(-1, Even(2)), "at least 0 blocks"),
        (lambda: Padded(5).local_size(0), ".over(n)"),
        (lambda: Padded(5).over(0), "at least 1 rank"),
        (lambda: Ragged(1, 2).over(3), "not over 3"),
    ],
)
def test_bad_extents_say_what_is_wrong(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        make()  # type: ignore[operator]
