"""Which experts are multiplied by one call, and that it is the same as one call for each."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from spmd_moe.compute import by_expert, products
from spmd_moe.compute.by_expert import ByExpert, Plain
from spmd_moe.compute.runs import LONGEST, MANY_ROWS, WORTH_A_CALL, Runs
from tests.spmd_moe.compute.test_by_expert import operands, same, with_gradients


def cut(counts: list[int], size: int | None) -> list[tuple[int, int, int]]:
    return [(run.start, run.end, run.width) for run in Runs(counts, size).runs]


def test_runs_end_where_a_call_of_its_own_is_faster() -> None:
    size = WORTH_A_CALL // 7
    assert cut([1, 8], size) == [(0, 2, 8)]
    assert cut([1, 9], size) == [(0, 1, 1), (1, 2, 9)]
    assert cut([9, 9, 2], size) == [(0, 3, 9)]
    assert cut([9, 9, 1], size) == [(0, 2, 9), (2, 3, 1)]
    # Two experts get two rows of padding each.
    assert cut([1, 1, 3], size) == [(0, 3, 3)]
    assert cut([1, 1, 3], WORTH_A_CALL // 3) == [(0, 2, 1), (2, 3, 3)]
    assert cut([1, 8], None) == [(0, 1, 1), (1, 2, 8)]


def test_a_run_is_neither_long_nor_of_many_rows() -> None:
    assert cut([1] * LONGEST, 1) == [(0, LONGEST, 1)]
    assert cut([1] * (LONGEST + 1), 1)[1:] == [(LONGEST, LONGEST + 1, 1)]
    few, many = MANY_ROWS - 1, MANY_ROWS
    assert cut([few, few], 1) == [(0, 2, few)]
    assert cut([few, many], 1) == [(0, 1, few), (1, 2, many)]


def test_experts_without_rows_are_apart() -> None:
    assert cut([0, 0, 3, 0, 1, 1], 1) == [(0, 2, 0), (2, 3, 3), (3, 4, 0), (4, 6, 1)]


@given(st.lists(st.integers(0, 9), max_size=9), st.sampled_from([None, 1, 400_000, 10**9]))
def test_rows_come_back_from_between_zeros(counts: list[int], size: int | None) -> None:
    plan = Runs(counts, size)
    experts = [e for run in plan.runs for e in range(run.start, run.end)]
    assert experts == list(range(len(counts)))
    rows_NK = torch.arange(1.0, 1 + 2 * sum(counts)).view(-1, 2)
    padded = plan.padded(rows_NK)
    assert torch.equal(plan.unpadded(padded), rows_NK)
    assert padded.sum() == rows_NK.sum()
    for run, batch in zip(plan.runs, plan.batches(padded), strict=True):
        mine = counts[run.start : run.end]
        first = sum(counts[: run.start])
        assert batch.numel() == 2 * run.width * len(mine)
        for count, found in zip(mine, batch.view(len(mine), run.width, 2), strict=True):
            assert torch.equal(found[:count], rows_NK[first : first + count])
            first += count


@pytest.mark.parametrize(
    "counts", [[2, 2, 2], [1, 0, 0, 3, 2, 5], [0, 0], [4], [9, 1, 130]]
)
def test_batches_compute_what_single_experts_do(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, which no processor widens: the same on all of them."""
    tensors = operands(counts, 6, 5, torch.float64)
    wanted = with_gradients(Plain(), tensors, counts, known=True)
    monkeypatch.setattr(by_expert, "has_fast_batches", lambda _: True)
    same(with_gradients(ByExpert(), tensors, counts, known=True), wanted)
    with torch.no_grad():
        rows, w1, w3, w2 = tensors
        quiet = ByExpert()(rows, w1, w3, w2, torch.tensor(counts), None)
    same([quiet] * 5, [wanted[0]] * 5)


def test_an_expert_sees_nothing_of_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no number stays with the expert that has it."""
    monkeypatch.setattr(by_expert, "has_fast_batches", lambda _: True)
    tensors = operands([3, 1, 2], 4, 6, torch.float64)
    tensors[0].data[3] = torch.nan
    y, d_rows, *d_weights = with_gradients(ByExpert(), tensors, [3, 1, 2], known=True)
    for found in (y, d_rows):
        assert found.isnan().any(1).tolist() == [False] * 3 + [True] + [False] * 2
    for found in d_weights:
        assert found.isnan().flatten(1).any(1).tolist() == [False, True, False]


def test_batches_are_for_half_precision_that_is_not_widened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "is_widened", lambda dtype: dtype == torch.float16)
    fast = products.has_fast_batches.__wrapped__
    assert fast(torch.bfloat16)
    assert not any(map(fast, [torch.float16, torch.float32, torch.float64]))
