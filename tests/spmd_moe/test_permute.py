"""Orders of slots and rows: laws, and the hand cases of the seeds."""

from contextlib import nullcontext

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch._subclasses import FakeTensorMode

from placements import (
    Index,
    Padded,
    R,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.collectives.rows import row_numbers
from spmd_moe import MoE, permute, route
from spmd_moe.permute import count_experts, inverse, regroup, routing_map, sort_slots
from tests.support.moe import CONFIG


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2)))
@settings(deadline=None)
def test_slots_are_sorted_by_expert_and_stable(ids: list[list[int]]) -> None:
    expert_ids_TK = torch.tensor(ids, dtype=torch.int64).view(-1, 2)
    order_N = sort_slots(expert_ids_TK)
    flat = expert_ids_TK.flatten().tolist()
    assert order_N.tolist() == sorted(range(len(flat)), key=lambda slot: flat[slot])
    counts_E = count_experts(expert_ids_TK, 5)
    assert counts_E.tolist() == [flat.count(expert) for expert in range(5)]
    assert counts_E.sum() == len(flat) and counts_E.dtype == torch.int64


@given(st.integers(0, 12).flatmap(lambda n: st.permutations(range(n))))
@settings(deadline=None)
def test_an_order_and_its_inverse_are_the_identity(order: list[int]) -> None:
    order_N = torch.tensor(order, dtype=torch.int64)
    x = torch.arange(len(order))
    assert torch.equal(x[order_N][inverse(order_N)], x)
    assert torch.equal(x[inverse(order_N)][order_N], x)


@pytest.mark.parametrize(
    ("received", "order"),
    [
        ([[2, 3], [1, 4]], [0, 1, 5, 2, 3, 4, 6, 7, 8, 9]),
        ([[0, 3], [2, 0]], [3, 4, 0, 1, 2]),
        ([[0, 0], [0, 0]], []),
        ([[2, 2], [2, 2], [2, 2]], [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]),
        ([[1, 2, 1]], [0, 1, 2, 3]),
        ([[2], [1]], [0, 1, 2]),
    ],
)
def test_rows_by_sender_become_rows_by_expert(
    received: list[list[int]], order: list[int]
) -> None:
    assert regroup(torch.tensor(received), len(order)).tolist() == order


def test_a_routing_map_has_a_one_for_each_choice() -> None:
    ids_TK = torch.tensor([[0, 1], [1, 2], [3, 0], [1, 3]])
    map_TE = routing_map(ids_TK, 4)
    assert map_TE.unique().tolist() == [0, 1] and map_TE.sum(1).tolist() == [2] * 4
    assert map_TE.sum(0).tolist() == [2, 3, 1, 2]


def test_an_expert_that_a_token_names_twice_counts_twice() -> None:
    ids_TK = torch.tensor([[0, 0, 1], [2, 2, 2], [3, 0, 3]])
    map_TE = routing_map(ids_TK, 4)
    assert map_TE.tolist() == [[2, 1, 0, 0], [0, 0, 3, 0], [1, 0, 0, 2]]
    counts_E = count_experts(ids_TK, 4)
    assert counts_E.tolist() == [3, 1, 3, 2] and counts_E.dtype == torch.int64


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_ids_out_of_range_are_refused(wrong: int, checked: bool) -> None:
    ids_TK = torch.tensor([[0, 1], [3, wrong]])
    with set_current_mesh({"tp": 2}), typecheck() if checked else nullcontext():
        assert_type(ids_TK, {"tp": S(0, Padded(4))}, index=Index(4))
        with pytest.raises(ValueError, match=f"has the id {wrong}, .* from 0 to 3"):
            count_experts(ids_TK, 4)


def test_ids_are_checked_once_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    plain = permute.check_ids

    def counted(ids_TK: Tensor, num_experts: int) -> None:
        looked.append(num_experts)
        plain(ids_TK, num_experts)

    monkeypatch.setattr(permute, "check_ids", counted)
    monkeypatch.setattr(route, "check_ids", counted)
    MoE(CONFIG)(torch.randn(5, 8), seq_len=5)
    assert looked == [CONFIG.num_experts]
    ids_TK = torch.tensor([[0, 1], [3, 9]])
    with pytest.raises(ValueError, match="has the id 9"):
        route.Routing(torch.ones(2, 2), ids_TK, torch.zeros(4, dtype=torch.int64))


class Named(torch.Tensor):
    """A subclass that computes as tensors do."""


def test_ids_of_a_subclass_are_looked_at_too() -> None:
    ids_TK = torch.tensor([[0, 1], [3, -1]])
    parameter = torch.nn.Parameter(ids_TK, requires_grad=False)
    for own in (ids_TK.as_subclass(Named), parameter):
        with pytest.raises(ValueError, match="has the id -1"):
            count_experts(own, 4)


def test_ids_without_values_are_not_looked_at() -> None:
    with FakeTensorMode() as mode:
        ids_TK = mode.from_tensor(torch.tensor([[0, 1], [3, -1]]))
        assert count_experts(ids_TK, 4).shape == (4,)


def test_row_numbers_count_the_rows_of_their_tensor_only() -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.randn(3, 4), {"dp": V, "tp": S(0, Padded(5))})
        rows = row_numbers(x, 0)
        known = type_of(rows)
        assert known == {"dp": V, "tp": S(0, Padded(5))}
        assert known is not None and known.index == Index(Padded(5).over(2), "tp")
        columns = type_of(row_numbers(x, 1))
        assert columns == {"dp": V, "tp": R}
        assert columns is not None and columns.index == Index(4)
