"""Seeds #3604 and #3577: tokens of a batch, cut along the sequence, find their rows.

The tables are those of seeds.md 1.4 and 2.4. The wrong versions are refused.
"""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from placements import (
    Folded,
    P,
    Padded,
    PlacementError,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    assert_type,
    convert,
    join,
    set_current_mesh,
    split,
    to_global,
    type_of,
    typecheck,
)
from placements.collectives.rows import row_numbers
from placements.testing import RankFailure, device_mesh, run_ranks
from spmd_moe import combine, combine_full_length
from spmd_moe.layouts import layout
from spmd_moe.paths.own import own_rows

C1 = layout("C1")
TABLE_1_4 = [
    (2, 4, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
    (3, 6, 3, [[0, 1, 6, 7, 12, 13], [2, 3, 8, 9, 14, 15], [4, 5, 10, 11, 16, 17]]),
    (1, 6, 3, [[0, 1], [2, 3], [4, 5]]),
    (2, 3, 1, [[0, 1, 2, 3, 4, 5]]),
    (2, 5, 2, [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]),
]
# B, L, sp -> valid, start
TABLE_2_4 = [
    (1, 5, 2, [3, 2], [0, 3]),
    (2, 5, 2, [3, 2], [0, 3]),
    (1, 7, 4, [2, 2, 2, 1], [0, 2, 4, 6]),
    (2, 7, 4, [2, 2, 2, 1], [0, 2, 4, 6]),
    (1, 1, 4, [1, 0, 0, 0], [0, 1, 1, 1]),
    (1, 3, 4, [1, 1, 1, 0], [0, 1, 2, 3]),
    (1, 5, 4, [2, 2, 1, 0], [0, 2, 4, 5]),
    (1, 9, 4, [3, 3, 3, 0], [0, 3, 6, 9]),
    (2, 6, 4, [2, 2, 2, 0], [0, 2, 4, 6]),
    (1, 8, 4, [2, 2, 2, 2], [0, 2, 4, 6]),
    (2, 0, 2, [0, 0], [0, 0]),
]


def rows_of_my_tokens(batch: int, length: int) -> list[int]:
    """Local rows to global rows, as the layer's tensors make them."""
    with set_current_mesh(device_mesh()) as mesh, typecheck():
        assert mesh is not None
        extent = Padded(length).over(mesh.sizes["tp"])
        here = extent.local_size(mesh.coordinate["tp"])
        x_BLD = assert_type(torch.zeros(batch, here, 1), {"tp": S(1, extent)})
        rows_T = row_numbers(x_BLD.flatten(0, 1), 0)
        return to_global(rows_T, "tp", Folded(batch, extent)).tolist()


@pytest.mark.parametrize(("batch", "length", "ranks", "rows"), TABLE_1_4)
def test_local_rows_become_global_rows(
    batch: int, length: int, ranks: int, rows: list[list[int]]
) -> None:
    assert run_ranks({"tp": ranks}, rows_of_my_tokens, batch, length) == rows


@pytest.mark.parametrize(("batch", "length", "ranks", "valid", "start"), TABLE_2_4)
def test_uneven_sequences_are_cut_like_chunks(
    batch: int, length: int, ranks: int, valid: list[int], start: list[int]
) -> None:
    extent = Padded(length).over(ranks)
    assert list(extent.sizes) == valid
    assert [extent.offset(rank) for rank in range(ranks)] == start
    every = run_ranks({"tp": ranks}, rows_of_my_tokens, batch, length)
    assert [len(rows) for rows in every] == [batch * n for n in valid]
    assert sorted(row for rows in every for row in rows) == list(
        range(batch * length)
    )  # each row once


def both_forms(rows_NB: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Identity experts, gates of 1/2 and two choices: (shard, full, convert's full)."""
    with set_current_mesh(device_mesh()) as mesh:
        assert mesh is not None
        extent = Padded(length).over(mesh.sizes["tp"])
        types = {"tp": S(1, extent)}
        mine = split(rows_NB, {"tp": S(1)}, mesh)[mesh.coordinate["tp"]]
        with typecheck():
            x_TD = assert_type(mine, types).flatten(0, 1)
            gates_TK = x_TD * 0 + assert_type(torch.full((1, 2), 0.5), {"tp": R})
            rows_ND = own_rows(x_TD).repeat_interleave(2, 0)
            options: Any = {"weigh": True}
            y_TD = combine(rows_ND, gates_TK, C1, **options)
            assert type_of(y_TD) == type_of(x_TD)
            folded = Folded(batch, extent).over(mesh.sizes["tp"])
            options |= {"axis": "tp", "extent": folded}
            full_TD = combine_full_length(rows_ND, gates_TK, C1, **options)
            assert type_of(full_TD) == ({"tp": P} if mesh.sizes["tp"] > 1 else {})
            placed = convert(y_TD, "tp", src=S(0, folded), dst=P)
            total = all_reduce(full_TD, "tp", src=P, dst=R)
        torch.testing.assert_close(full_TD, placed, rtol=0, atol=0)
    return y_TD, full_TD, total


@given(batch=st.integers(1, 3), length=st.integers(0, 7), ranks=st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=40)
def test_full_length_form_is_partial_with_every_token_in_its_row(
    batch: int, length: int, ranks: int
) -> None:
    whole = torch.arange(batch * length, dtype=torch.float32).view(batch, length, 1)
    every = run_ranks({"tp": ranks}, both_forms, whole, batch, length)
    for _, _, total in every:
        assert torch.equal(total, whole.flatten(0, 1))
    assert torch.equal(sum(full for _, full, _ in every), whole.flatten(0, 1))
    shards = [y.view(batch, -1, 1) for y, _, _ in every]
    assert torch.equal(join(shards, {"tp": S(1)}, {"tp": ranks}), whole)


def wrong_rows(how: str) -> None:
    """Versions of the published code that write a token to another token's row."""
    batch, length = 2, 5
    with set_current_mesh(device_mesh()) as mesh, typecheck():
        assert mesh is not None
        rank, extent = mesh.coordinate["tp"], Padded(length).over(2)
        here = extent.local_size(rank)
        x_BLD = assert_type(torch.ones(batch, here, 1), {"tp": S(1, extent)})
        y_TD = x_BLD.flatten(0, 1)
        rows_T = row_numbers(y_TD, 0)
        buffer = torch.zeros(batch * length, 1)
        if how == "rank times rows":
            rows_T = rows_T + rank * batch * here
        elif how == "decoded with the padded length":
            padded = 3
            rows_T = rows_T // padded * length + rank * padded + rows_T % padded
        elif how == "local rows":
            pass
        elif how == "the extent of B=1":
            rows_T = to_global(rows_T, "tp", Padded(batch * length))
        elif how == "a buffer of local rows times ranks":
            rows_T = to_global(rows_T, "tp", Folded(batch, extent))
            buffer = torch.zeros(batch * here * 2, 1)
        buffer.index_add(0, rows_T, y_TD)


@pytest.mark.parametrize(
    "how",
    [
        "rank times rows",  # upstream before #3604
        "decoded with the padded length",  # upstream since #3662
        "local rows",
        "the extent of B=1",  # upstream #3619
        "a buffer of local rows times ranks",  # upstream before #3577
    ],
)
def test_wrong_rows_are_refused(how: str) -> None:
    with pytest.raises(RankFailure, match="PlacementError"):
        run_ranks({"tp": 2}, wrong_rows, how)


def test_an_uneven_collective_must_say_its_extent() -> None:
    """#3577: without it ranks would disagree on the length once checking is off."""
    with set_current_mesh({"tp": 2}), typecheck():
        x = assert_type(torch.ones(2, 3, 1), {"tp": S(1, Padded(5))})
        with pytest.raises(PlacementError, match="cut unevenly"):
            all_gather(x, "tp", src=S(1), dst=R)
        assert all_gather(x, "tp", src=S(1, Padded(5)), dst=R).shape == (2, 5, 1)


def test_adding_rows_of_other_tokens_is_refused() -> None:
    """Own rows as a sum: what #3604's Varying buffer would be without a claim."""
    with set_current_mesh({"tp": 2}), typecheck():
        rows_ND = assert_type(torch.ones(4, 1), {"tp": V})
        with pytest.raises(PlacementError, match="Varying to"):
            all_reduce(rows_ND, "tp", src=V, dst=R)


def test_gates_multiply_in_float32() -> None:
    rows_ND = torch.tensor([[1.0], [1.0]], dtype=torch.bfloat16)
    gates_TK = torch.tensor([[1.0, 2.0**-9]])
    y_TD = combine(rows_ND * 3, gates_TK, C1, weigh=True)
    assert y_TD.dtype == torch.bfloat16
    exact = (gates_TK.sum() * 3).to(torch.bfloat16)
    assert torch.equal(y_TD.flatten()[0], exact)
