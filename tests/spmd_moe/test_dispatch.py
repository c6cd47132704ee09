"""Rows go to their experts and come back: laws, and the whole flow by hand."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from placements import (
    Index,
    PlacementError,
    S,
    V,
    all_to_all,
    assert_type,
    reinterpret_mesh,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from placements.types.mesh import as_mesh
from spmd_moe import AllToAllDispatcher, LocalDispatcher, MoE, Parallel, combine
from spmd_moe.layouts import layout
from spmd_moe.permute import count_experts
from spmd_moe.route import Routing
from tests.support.moe import CONFIG, PARALLELS, Case, on_ranks, whole

# seeds.md 5.4: E=4, K=2, ep=2, expert e multiplies by e + 1, D=1; by rank.
X = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]
IDS = [[[0, 1], [1, 2], [3, 0]], [[2, 3], [2, 0], [1, 3]]]
GATES = [[[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]], [[0.1, 0.9], [0.5, 0.5], [0.2, 0.8]]]


def flow(before: bool) -> tuple[list[float], list[int], list[float], list[float]]:
    """(rows by expert, their counts, rows by slot, y)"""
    dense, sparse = device_mesh(), as_mesh(device_mesh({"edp": 1, "ep": 2, "etp": 1}))
    rank, at = torch.distributed.get_rank(), layout("C1")
    x_TD = torch.tensor(X[rank]).unsqueeze(1)
    ids_TK, gates_TK = torch.tensor(IDS[rank]), torch.tensor(GATES[rank])
    factors_G = torch.tensor([[1.0, 2.0], [3.0, 4.0]][rank])
    with set_current_mesh(dense), typecheck():
        assert_type(x_TD, {"tp": S(0)})
        assert_type(ids_TK, {"tp": S(0)}, index=Index(4))
        assert_type(gates_TK, {"tp": S(0)})
        routing = Routing(gates_TK, ids_TK, count_experts(ids_TK, 4))
        dispatcher = AllToAllDispatcher(at, sparse, before)
        sent = dispatcher.dispatch(x_TD, routing)
        with dispatcher.on_expert_mesh():
            own_G = assert_type(factors_G, {"ep": V})
            factors_M = own_G.repeat_interleave(sent.counts_G)
            rows_MD = sent.rows_MD * factors_M.unsqueeze(1)
        back_ND = dispatcher.collect(rows_MD, sent.plan)
        y_TD = combine(back_ND, gates_TK, at, weigh=not before)
        assert type_of(y_TD) == {"tp": S(0)}
        flat = [t.flatten().tolist() for t in (sent.rows_MD, back_ND, y_TD)]
        return flat[0], sent.counts_G.tolist(), flat[1], flat[2]


def test_whole_flow_by_hand() -> None:
    first, second = run_ranks({"tp": 2}, flow, False)
    assert first[:2] == ([1.0, 3.0, 20.0, 1.0, 2.0, 30.0], [3, 3])
    assert second[:2] == ([2.0, 10.0, 20.0, 3.0, 10.0, 30.0], [3, 3])
    # Seeds list what returns by expert; collect has put it in the order of the slots.
    assert first[2] == [1.0, 2.0, 4.0, 6.0, 12.0, 3.0]
    assert second[2] == [30.0, 40.0, 60.0, 20.0, 60.0, 120.0]
    assert first[3] == [1.5, 5.5, 12.0]
    assert second[3] == [39.0, 40.0, 108.0]


def test_whole_flow_by_hand_with_gates_before_the_experts() -> None:
    first, second = run_ranks({"tp": 2}, flow, True)
    assert first[3] == [1.5, 5.5, 12.0]
    assert second[3] == [39.0, 40.0, 108.0]


@st.composite
def routings(draw: st.DrawFn) -> tuple[Tensor, Routing]:
    """Any tokens (none included) with distinct experts, skewed or not."""
    experts, tokens = draw(st.integers(1, 5)), draw(st.integers(0, 6))
    choices = draw(st.integers(1, experts))
    ids = [draw(st.permutations(range(experts)))[:choices] for _ in range(tokens)]
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(tokens, choices)
    gates_TK = torch.randint(1, 5, (tokens, choices)).double()
    x_TD = torch.randint(-9, 9, (tokens, 3)).double()
    return x_TD, Routing(gates_TK, ids_TK, count_experts(ids_TK, experts))


@given(routings(), st.booleans())
@settings(deadline=None)
def test_identity_experts_return_x_times_the_gates(
    drawn: tuple[Tensor, Routing], before: bool
) -> None:
    x_TD, routing = drawn
    dispatcher = LocalDispatcher(layout("C4"), before)
    sent = dispatcher.dispatch(x_TD, routing)
    assert int(sent.counts_G.sum()) == routing.expert_ids_TK.numel()
    rows_ND = dispatcher.collect(sent.rows_MD, sent.plan)
    y_TD = combine(rows_ND, routing.gates_TK, layout("C4"), weigh=not before)
    assert torch.equal(y_TD, x_TD * routing.gates_TK.sum(1, keepdim=True))


def test_permuting_tokens_permutes_outputs() -> None:
    moe = MoE(CONFIG).double()
    x_TD = torch.randn(7, 8, dtype=torch.float64)
    order = torch.randperm(7)
    y_TD = moe(x_TD, seq_len=7)
    torch.testing.assert_close(moe(x_TD[order], seq_len=7), y_TD[order])


def test_relabelling_experts_changes_nothing() -> None:
    moe, other = MoE(CONFIG).double(), MoE(CONFIG).double()
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        for name, weight in moe.named_parameters():
            if not name.startswith("shared"):
                other.get_parameter(name).copy_(weight[order])
    x_TD = torch.randn(7, 8, dtype=torch.float64)
    torch.testing.assert_close(other(x_TD, seq_len=7), moe(x_TD, seq_len=7))


@pytest.mark.parametrize("parallel", [PARALLELS[7], PARALLELS[8]])
def test_more_ranks_equal_one_rank(parallel: Parallel) -> None:
    case = Case(parallel)
    one = on_ranks(replace(case, parallel=Parallel(), batch=case.batch * parallel.dp))
    y = whole(on_ranks(case), case)[0]
    torch.testing.assert_close(y, one[0].y, rtol=0, atol=1e-12)


def test_rows_of_the_dense_mesh_cannot_be_sent_over_ep() -> None:
    sparse = {"edp": 1, "ep": 2, "etp": 1}
    with set_current_mesh({"dp": 1, "cp": 1, "tp": 2}), typecheck():
        rows_ND = assert_type(torch.ones(4, 3), {"tp": V})
        sent = {"input_split_sizes": [2, 2], "output_split_sizes": [2, 2]}
        with set_current_mesh(sparse), pytest.raises(PlacementError, match="reinterpret"):
            all_to_all(rows_ND, "ep", **sent)
        with set_current_mesh(sparse):
            rows_MD = all_to_all(reinterpret_mesh(rows_ND, sparse), "ep", **sent)
            assert type_of(rows_MD) == {"ep": V}


def test_tokens_that_are_pieces_are_sorted_as_own_rows_and_cannot_be_sent() -> None:
    """To be sent, they must be seen as the rank's own rows first."""
    with set_current_mesh({"ep": 2}), typecheck():
        ids = assert_type(torch.zeros(4, dtype=torch.int64), {"ep": S(0)})
        assert type_of(ids.argsort(stable=True)) == {"ep": V}
        x_TD = assert_type(torch.ones(4, 3), {"ep": S(0)})
        with pytest.raises(PlacementError):
            all_to_all(x_TD, "ep", src=V, dst=V)
