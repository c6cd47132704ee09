"""Rows by sender become rows by expert: by hand, each way, and with padding."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from spmd_moe.paths.agreement import Agreed
from spmd_moe.paths.equal_split import Exchange
from spmd_moe.paths.regroup import (
    AbstractRegrouping,
    ByIndex,
    ByParts,
    ByView,
    PadGroups,
    regrouped,
    unpermute_padded,
)


def agreed_on(by_sender: list[list[int]], known: bool = True) -> Agreed:
    received = [sum(row) for row in by_sender]
    return Agreed(
        Exchange(received, received), torch.tensor(by_sender), by_sender if known else None
    )


def ways(by_sender: list[list[int]]) -> list[AbstractRegrouping]:
    """Without and with numbers on the host."""
    rows = sum(map(sum, by_sender))
    return [regrouped(agreed_on(by_sender, known), rows) for known in (False, True)]


def order_of(regrouping: AbstractRegrouping, rows: int) -> list[int]:
    return regrouping.to_experts(torch.arange(rows).unsqueeze(1)).flatten().tolist()


@pytest.mark.parametrize(
    ("by_sender", "order", "totals", "kind"),
    [
        ([[2, 3], [1, 4]], [0, 1, 5, 2, 3, 4, 6, 7, 8, 9], [3, 7], ByParts),
        ([[0, 3], [2, 0]], [3, 4, 0, 1, 2], [2, 3], ByParts),
        ([[0, 0], [0, 0]], [], [0, 0], ByView),
        ([[2, 2]] * 3, [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11], [6, 6], ByView),
        ([[1, 2, 1]], [0, 1, 2, 3], [1, 2, 1], ByParts),
        ([[2], [1]], [0, 1, 2], [3], ByParts),
    ],
)
def test_by_hand(
    by_sender: list[list[int]], order: list[int], totals: list[int], kind: type
) -> None:
    by_index, chosen = ways(by_sender)
    assert isinstance(by_index, ByIndex) and isinstance(chosen, kind)
    for regrouping in (by_index, chosen):
        assert order_of(regrouping, len(order)) == order
        assert regrouping.counts_G.tolist() == totals
    assert by_index.counts_list is None and chosen.counts_list == totals


@given(st.integers(1, 4).flatmap(
    lambda experts: st.lists(
        st.lists(st.integers(0, 3), min_size=experts, max_size=experts),
        min_size=1, max_size=4,
    )
))  # fmt: skip
@settings(deadline=None)
def test_every_way_equals_the_index_in_values_and_gradients(
    by_sender: list[list[int]],
) -> None:
    rows = sum(map(sum, by_sender))
    equal = [[by_sender[0][0]] * len(by_sender[0])] * len(by_sender)
    for counts in (by_sender, equal):
        rows = sum(map(sum, counts))
        by_index, chosen = ways(counts)
        assert not isinstance(chosen, ByIndex)
        weights = torch.randn(rows, 2)
        for way in ("to_experts", "to_senders"):
            found: list[tuple[Tensor, Tensor]] = []
            x = torch.arange(2.0 * rows).view(rows, 2)
            for regrouping in (by_index, chosen):
                leaf = x.clone().requires_grad_()
                y = getattr(regrouping, way)(leaf)
                (y * weights).sum().backward()
                assert leaf.grad is not None
                found.append((y, leaf.grad))
            assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert torch.equal(chosen.to_senders(chosen.to_experts(x)), x)


def test_many_parts_go_by_index() -> None:
    by_sender = [[1, 2] * 9] * 4
    assert isinstance(regrouped(agreed_on(by_sender), 108), ByIndex)


@pytest.mark.parametrize("known", [False, True])
def test_groups_are_padded_with_the_sentinel(known: bool) -> None:
    regrouping = PadGroups(4)(agreed_on([[2, 3], [1, 4]], known), 10)
    assert regrouping.counts_list == [4, 8] == regrouping.counts_G.tolist()
    x = (torch.arange(10.0) + 1).unsqueeze(1).requires_grad_()
    rows = regrouping.to_experts(x)
    assert rows.flatten().tolist() == [1, 2, 6, 0, 3, 4, 5, 7, 8, 9, 10, 0]
    # What an expert makes of a row of padding is lost.
    back = regrouping.to_senders(torch.where(rows == 0, torch.tensor(99.0), rows))
    assert torch.equal(back, x)
    back.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(10, 1))


def test_equal_counts_are_padded_too() -> None:
    """The fork took the view of equal counts, which skips the padding."""
    regrouping = PadGroups(4)(agreed_on([[1, 1], [1, 1]]), 4)
    assert not isinstance(regrouping, ByView)
    assert regrouping.counts_list == [4, 4]
    rows = regrouping.to_experts(torch.ones(4, 1))
    assert rows.flatten().tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


def test_groups_without_rows_have_no_padding() -> None:
    regrouping = PadGroups(16)(agreed_on([[0, 0]]), 0)
    rows = regrouping.to_experts(torch.ones(0, 3))
    assert rows.shape == (0, 3) and regrouping.to_senders(rows).shape == (0, 3)


def test_unpermuting_drops_the_last_row_and_refuses_views() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0]])  # a, b, c at 2, 0, 1 of four places
    back = unpermute_padded(rows, torch.tensor([2, 0, 1]), 3)
    assert back.flatten().tolist() == [2.0, 3.0, 1.0]
    with pytest.raises(ValueError, match="cannot be undone by the view \\(2, 2, 1\\)"):
        unpermute_padded(rows, torch.tensor([2, 0, 1]), 3, (2, 2, 1))
    with pytest.raises(ValueError, match="multiple \\(0\\) must be at least 1"):
        PadGroups(0)
