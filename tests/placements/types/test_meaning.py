"""split and join are exact inverses, for every type and every way to cut."""

from itertools import product

import pytest
import torch

from placements import Folded, I, P, Padded, R, Ragged, S, V, ZigZag, join, split
from placements.types.axis import AxisType

TYPES: list[AxisType] = [R, I, P, S(0), S(1), S(0, Padded(5)), S(1, Ragged(4, 0, 2))]


@pytest.mark.parametrize(("dp", "tp"), list(product(TYPES, TYPES)), ids=str)
def test_join_undoes_split(dp: AxisType, tp: AxisType) -> None:
    value = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
    for sizes in ({"dp": 3, "tp": 3}, {"dp": 3, "tp": 1}, {"dp": 1, "tp": 3}):
        if (
            sizes == {"dp": 3, "tp": 3}
            and isinstance(dp, S)
            and isinstance(tp, S)
            and dp.dim == tp.dim
        ):
            continue  # the inner extent would have to differ by rank: tested below
        types = {"dp": dp, "tp": tp}
        locals_ = split(value, types, sizes)
        assert len(locals_) == sizes["dp"] * sizes["tp"]
        assert torch.equal(join(locals_, types, sizes), value)


def test_two_axes_cut_one_dim_in_the_stated_order() -> None:
    value = torch.arange(8)
    mesh = {"dp": 2, "tp": 2}
    assert [x.tolist() for x in split(value, {"dp": S(0), "tp": S(0)}, mesh)] == [
        [0, 1], [2, 3], [4, 5], [6, 7]
    ]  # fmt: skip
    assert [x.tolist() for x in split(value, {"tp": S(0), "dp": S(0)}, mesh)] == [
        [0, 1], [4, 5], [2, 3], [6, 7]
    ]  # fmt: skip
    for types in ({"dp": S(0), "tp": S(0)}, {"tp": S(0), "dp": S(0)}):
        for length in range(10):
            rows = torch.arange(length)
            assert torch.equal(join(split(rows, types, mesh), types, mesh), rows)


def test_pieces_of_five_rows_over_two_and_four_ranks() -> None:
    value = torch.arange(5)
    assert [x.tolist() for x in split(value, {"tp": S(0)}, {"tp": 2})] == [
        [0, 1, 2],
        [3, 4],
    ]
    assert [x.tolist() for x in split(value, {"tp": S(0)}, {"tp": 4})] == [
        [0, 1],
        [2, 3],
        [4],
        [],
    ]


def test_folded_pieces_are_the_flattened_pieces() -> None:
    value = torch.arange(20).reshape(2, 5, 2)
    pieces = split(value, {"tp": S(1)}, {"tp": 2})
    flat = split(value.reshape(10, 2), {"tp": S(0, Folded(2, Padded(5)))}, {"tp": 2})
    for piece, rows in zip(pieces, flat, strict=True):
        assert torch.equal(piece.reshape(-1, 2), rows)
    assert torch.equal(
        join(flat, {"tp": S(0, Folded(2, Padded(5)))}, {"tp": 2}), value.reshape(10, 2)
    )


@pytest.mark.parametrize("ranks", [2, 4])
def test_zigzag_pieces_are_the_rows_of_the_extent(ranks: int) -> None:
    value, mesh = torch.arange(96).reshape(2, 16, 3), {"cp": ranks}
    types = {"cp": S(1, ZigZag(16))}
    pieces = split(value, types, mesh)
    for rank, piece in enumerate(pieces):
        assert torch.equal(piece, value[:, ZigZag(16).over(ranks).rows(rank)])
    assert torch.equal(join(pieces, types, mesh), value)
    flat = split(value.flatten(0, 1), {"cp": S(0, Folded(2, ZigZag(16)))}, mesh)
    for piece, rows in zip(pieces, flat, strict=True):
        assert torch.equal(piece.flatten(0, 1), rows)
    assert torch.equal(
        join(flat, {"cp": S(0, Folded(2, ZigZag(16)))}, mesh), value.flatten(0, 1)
    )


def test_varying_values_are_stacked() -> None:
    value = torch.arange(24).reshape(2, 3, 4)
    types = {"dp": V, "tp": V}
    locals_ = split(value, types, {"dp": 2, "tp": 3})
    assert torch.equal(locals_[4], value[1, 1])
    assert torch.equal(join(locals_, types, {"dp": 2, "tp": 3}), value)


def test_a_partial_is_any_summands() -> None:
    locals_ = [torch.tensor([1, 2]), torch.tensor([10, 20])]
    assert join(locals_, {"tp": P}, {"tp": 2}).tolist() == [11, 22]


def test_join_refuses_locals_that_are_not_what_the_type_says() -> None:
    a, b = torch.tensor([1]), torch.tensor([2])
    with pytest.raises(ValueError, match="rank 0 and rank 1 differ"):
        join([a, b], {"tp": R}, {"tp": 2})
    with pytest.raises(ValueError, match="they hold"):
        join([a, b], {"tp": S(0, Padded(3))}, {"tp": 2})
    with pytest.raises(ValueError, match="got 1 locals"):
        join([a], {"tp": R}, {"tp": 2})
    with pytest.raises(ValueError, match="no placement for mesh axis 'dp'"):
        split(a, {"tp": R}, {"tp": 2, "dp": 2})
    with pytest.raises(ValueError, match="cuts 4 rows"):
        split(a, {"tp": S(0, Padded(4))}, {"tp": 2})
    with pytest.raises(ValueError, match="names a dim"):
        split(a, {"tp": S(3)}, {"tp": 2})
