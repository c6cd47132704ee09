"""Extents: the tables of the seeds, and that rows are numbered one to one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from placements import (
    Even,
    Folded,
    I,
    Mesh,
    Padded,
    PlacementError,
    R,
    Ragged,
    S,
    ZigZag,
    all_gather,
    all_to_all,
    assert_type,
    convert,
    join,
    redistribute,
    set_current_mesh,
    split,
    to_global,
    to_local,
    type_of,
    typecheck,
)
from placements.collectives.rows import row_numbers
from placements.testing import device_mesh, run_ranks
from placements.types.extents import Extent

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


# ranks -> the global rows of every rank's local rows, of 16
ZIGZAG = [
    (1, [list(range(16))]),
    (2, [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
    (4, [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]),
    (8, [[0, 15], [1, 14], [2, 13], [3, 12], [4, 11], [5, 10], [6, 9], [7, 8]]),
]


@pytest.mark.parametrize(("ranks", "rows"), ZIGZAG)
def test_zigzag_rows_are_a_run_from_the_front_and_one_from_the_back(
    ranks: int, rows: list[list[int]]
) -> None:
    extent = ZigZag(16).over(ranks)
    assert [extent.rows(r) for r in range(ranks)] == rows
    assert [extent.offset(r) for r in range(ranks)] == [held[0] for held in rows]
    folded = Folded(2, ZigZag(16)).over(ranks)
    assert [folded.rows(r) for r in range(ranks)] == [
        [*held, *(row + 16 for row in held)] for held in rows
    ]


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
    ZigZag(16).over(2),
    ZigZag(16).over(4),
    ZigZag(6).over(1),
    ZigZag(0).over(3),
    Folded(3, ZigZag(8)).over(2),
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
    assert ZigZag(8).over(2) == ZigZag(8)
    assert ZigZag(8).over(2) != ZigZag(8).over(4)
    assert ZigZag(8).over(1) == Even(8).over(1)
    assert ZigZag(0).over(2) == Even(0).over(2)
    assert ZigZag(8) != Even(8)
    assert ZigZag(8).over(2) != Even(8).over(2)
    assert ZigZag(8).over(2) != Folded(2, Even(4)).over(2)
    assert ZigZag(6) != Even(6).over(2)
    assert Folded(2, Folded(2, ZigZag(4))) == Folded(4, ZigZag(4))


def test_scaling_and_dividing_are_inverse() -> None:
    for extent in EXTENTS:
        assert extent.scaled(3).divided(3) == extent
    assert Padded(5).over(2).divided(2) is None
    assert ZigZag(16).over(2).divided(4) == ZigZag(4)
    assert ZigZag(16).over(2).divided(8) is None  # pieces of 8 rows, but in runs of 4


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
        (lambda: ZigZag(-1), "at least 0"),
        (lambda: ZigZag(12).over(4), "each of 4 ranks: pad to 16 rows, a multiple of 8"),
        (lambda: Folded(2, ZigZag(6)).over(2), "ZigZag(6) does not give two equal runs"),
    ],
)
def test_bad_extents_say_what_is_wrong(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(")", r"\)")):
        make()  # type: ignore[operator]


ZIG, RUN = S(0, ZigZag(16)), S(0, Even(16))

# what is done with zig-zag x and contiguous y, both rows of 16 over 2 ranks; what is said
MIXED: dict[str, tuple[Callable[[Tensor, Tensor], object], str]] = {
    "sum": (lambda x, y: x + y, "in their rows: ZigZag(16) and Even(16)"),
    "product": (lambda x, y: x.mT @ y, "in their rows: ZigZag(16) and Even(16)"),
    "cat": (lambda x, y: torch.cat([x, y], 1), "in their rows: ZigZag(16) and Even(16)"),
    "bare gather": (
        lambda x, y: all_gather(x, "cp", src=S(0), dst=R),
        "cut into other runs, ZigZag(16), and src=S(0)",
    ),
    "gather of x as y": (lambda x, y: all_gather(x, "cp", src=RUN, dst=R), "src must be"),
    "gather of y as x": (lambda x, y: all_gather(y, "cp", src=ZIG, dst=R), "src must be"),
    "declared anew": (
        lambda x, y: assert_type(y, {"cp": ZIG}),
        "expected S(0, ZigZag(16))",
    ),
    "recut": (
        lambda x, y: all_to_all(x, "cp", src=ZIG, dst=RUN),
        "convert(all_gather(x, 'cp', src=S(0, ZigZag(16)), dst=R), 'cp', src=R, dst=S(0))",
    ),
    "redistribute": (
        lambda x, y: redistribute(y, "cp", src=RUN, dst=ZIG),
        "convert(all_gather(y, 'cp', src=S(0), dst=R), 'cp', src=R, dst=S(0, ZigZag(16)))",
    ),
    "convert": (lambda x, y: convert(x, "cp", src=ZIG, dst=RUN), "one cut of a dim"),
}


@pytest.mark.parametrize("name", MIXED)
def test_zigzag_and_contiguous_pieces_do_not_mix_silently(name: str) -> None:
    call, says = MIXED[name]
    with set_current_mesh({"cp": 2}), typecheck():
        x = assert_type(torch.ones(8, 4), {"cp": ZIG})
        y = assert_type(torch.ones(8, 4), {"cp": RUN})
        with pytest.raises(PlacementError) as caught:
            call(x, y)
        assert says in str(caught.value)
        assert caught.value.axis == "cp"


def _to_runs(pieces: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Zig-zag to contiguous: gathered and cut, by way of another dim, and one batch of it."""
    mesh = device_mesh()
    with set_current_mesh(mesh), typecheck():
        x = assert_type(pieces[mesh.get_local_rank("cp")], {"cp": ZIG})
        cut = convert(all_gather(x, "cp", src=ZIG, dst=R), "cp", src=R, dst=RUN)
        moved = all_to_all(x, "cp", src=ZIG, dst=S(1))
        moved = all_to_all(moved, "cp", src=S(1), dst=RUN)
        assert type_of(cut) == type_of(moved) == {"cp": RUN}
        flat = torch.stack([x, x + 1]).flatten(0, 1)
        assert type_of(flat) == {"cp": S(0, Folded(2, ZigZag(16)))}
        assert type_of(flat.unflatten(0, (2, -1))) == {"cp": S(1, ZigZag(16))}
        return cut, moved, all_gather(flat, "cp", src=S(0, Folded(2, ZigZag(16))), dst=I)


@pytest.mark.parametrize("ranks", [2, 4])
def test_zigzag_becomes_contiguous_by_collectives(ranks: int) -> None:
    value, mesh = torch.arange(64.0).reshape(16, 4), {"cp": ranks}
    results = run_ranks(mesh, _to_runs, split(value, {"cp": ZIG}, mesh))
    for way in (0, 1):
        held = [result[way] for result in results]
        assert torch.equal(join(held, {"cp": RUN}, mesh), value)
    for _, _, batch in results:
        assert torch.equal(batch, torch.cat([value, value + 1]))


def test_an_axis_of_one_rank_changes_neither_an_index_nor_its_type() -> None:
    with set_current_mesh(Mesh({"cp": 1, "tp": 2}, {"tp": 1})), typecheck():
        x_LD = assert_type(torch.zeros(3, 2), {"tp": S(0)})
        here_L = row_numbers(x_LD, 0)
        over_cp_L = to_global(here_L, "cp", Even(3))
        owner_L, again_L = to_local(over_cp_L, "cp", Even(3))
        assert over_cp_L.tolist() == again_L.tolist() == [0, 1, 2]
        assert type_of(over_cp_L) == type_of(again_L) == type_of(here_L)
        assert owner_L.tolist() == [0, 0, 0] and type_of(owner_L) == {"tp": S(0)}
        # still an index of this rank's own rows, so it can be counted over tp
        assert to_global(over_cp_L, "tp", Even(6)).tolist() == [3, 4, 5]


def test_causal_attention_is_in_balance_over_zigzag_rows() -> None:
    for ranks in (2, 4, 8):
        extent = ZigZag(16).over(ranks)
        pairs = [sum(row + 1 for row in extent.rows(r)) for r in range(ranks)]
        assert set(pairs) == {sum(range(17)) // ranks}
        runs = Even(16).over(ranks)
        assert len({sum(runs.rows(r)) for r in range(ranks)}) == ranks


def _attend(q_LD: Tensor, k_MD: Tensor, rows_L: Tensor) -> Tensor:
    """Causal attention of the rows of the sequence that `rows_L` names."""
    later_LM = rows_L[:, None] < row_numbers(k_MD, 0)[None, :]
    return (q_LD @ k_MD.mT).masked_fill(later_LM, -torch.inf).softmax(1) @ k_MD


def _attend_to_all(pieces: list[Tensor]) -> Tensor:
    mesh = device_mesh()
    with set_current_mesh(mesh), typecheck():
        q_LD = assert_type(pieces[mesh.get_local_rank("cp")], {"cp": ZIG})
        k_MD = all_gather(q_LD, "cp", src=ZIG, dst=R)
        y_LD = _attend(q_LD, k_MD, to_global(row_numbers(q_LD, 0), "cp", ZigZag(16)))
        assert type_of(y_LD) == {"cp": ZIG}
        return all_gather(y_LD, "cp", src=ZIG, dst=R)


@pytest.mark.parametrize("ranks", [2, 4])
def test_causal_attention_over_zigzag_rows_keeps_the_order(ranks: int) -> None:
    x_LD = torch.randn(16, 4, dtype=torch.float64)
    expected_LD = _attend(x_LD, x_LD, torch.arange(16))
    mesh = {"cp": ranks}
    for y_LD in run_ranks(mesh, _attend_to_all, split(x_LD, {"cp": ZIG}, mesh)):
        torch.testing.assert_close(y_LD, expected_LD)
