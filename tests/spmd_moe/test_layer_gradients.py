"""Seed #2416: the gate's gradient is complete on every rank, summed exactly once.

The hand cases T1 to T4 of seeds.md 4.4, and wrong versions, which are refused.
"""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from placements import (
    I,
    P,
    Padded,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    convert,
    declare,
    reduce_gradients,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, Parallel, update_expert_bias
from tests.spmd_moe.test_layer import named
from tests.spmd_moe.test_layouts import BY_NAME
from tests.support.moe import CONFIG, PARALLELS, Case, build, meshes, on_one_device

W1, W2 = (2.0, 3.0), (5.0, 7.0)


class Gate(nn.Module):
    def __init__(self, placed: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        declare(self, {"weight": {"tp": placed}})  # type: ignore[dict-item]

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def t1(before: bool, placed: object, times: int) -> tuple[float, float, float, float]:
    """One token, one expert out = sum_f w2_f w1_f x cut over tp, loss y = out * s."""
    with set_current_mesh(device_mesh()):
        gate, rank = Gate(placed), dist.get_rank()
        x = torch.ones(1, requires_grad=True)
        w1, w2 = torch.tensor([W1[rank]]), torch.tensor([W2[rank]])
        with typecheck():
            assert_type(x, {"tp": I})
            assert_type(w1, {"tp": S(0)})
            assert_type(w2, {"tp": S(0)})
            entered = convert(x, "tp", src=I, dst=R)
            score = gate(entered)
            inner = entered * score if before else entered
            out = (w2 * (w1 * inner)).sum()
            out = out if before else (out * score).sum()
            y = all_reduce(out, "tp", src=P, dst=I)
            y.backward()
        assert gate.weight.grad is not None and x.grad is not None
        share = float(gate.weight.grad)
        for _ in range(times):
            reduce_gradients(gate)
        return float(y.detach()), share, float(gate.weight.grad), float(x.grad)


@pytest.mark.parametrize("before", [True, False])
def test_t1_shares_are_10_and_21_and_their_sum_is_on_both_ranks(before: bool) -> None:
    assert run_ranks({"tp": 2}, t1, before, R, 1) == [
        (31.0, 10.0, 31.0, 62.0),
        (31.0, 21.0, 31.0, 62.0),
    ]


@pytest.mark.parametrize("before", [True, False])
def test_t1_an_invariant_gate_is_refused(before: bool) -> None:
    """The bug: the gate's output taken for one computation that all ranks repeat."""
    with pytest.raises(Exception, match="Invariant mixes with nothing"):
        run_ranks({"tp": 2}, t1, before, I, 1)


def test_t3_a_second_reduction_is_refused() -> None:
    with pytest.raises(Exception, match="was reduced already"):
        run_ranks({"tp": 2}, t1, True, R, 2)


def t2(placed: object) -> tuple[float, float]:
    """Tokens over tp: x = [1, 2], d_s = [3, 4]."""
    with set_current_mesh(device_mesh()):
        gate, rank = Gate(placed), dist.get_rank()
        x, d_s = torch.tensor([1.0 + rank]), torch.tensor([3.0 + rank])
        with typecheck():
            assert_type(x, {"tp": S(0)})
            assert_type(d_s, {"tp": S(0)})
            (gate(x) * d_s).sum().backward()
        assert gate.weight.grad is not None
        share = float(gate.weight.grad)
        reduce_gradients(gate)
        return share, float(gate.weight.grad)


def test_t2_shares_are_3_and_8_and_their_sum_is_on_both_ranks() -> None:
    assert run_ranks({"tp": 2}, t2, R) == [(3.0, 11.0), (8.0, 11.0)]
    with pytest.raises(Exception, match="Invariant mixes with nothing"):
        run_ranks({"tp": 2}, t2, I)


@pytest.mark.parametrize("name", BY_NAME)
def test_an_invariant_gate_weight_is_refused_in_every_configuration(name: str) -> None:
    parallel = BY_NAME[name]
    with set_current_mesh(parallel.dense_mesh()):
        moe = MoE(CONFIG, parallel)
        declare(moe.router, {"w_gate_ED": {"dp": R, "cp": R, "tp": I}})
        x = torch.randn(2, 2 if parallel.sequence_parallel else 4, 8)
        with typecheck():
            assert_type(x, moe.input_types(4))
            with pytest.raises(PlacementError) as caught:
                moe(x, seq_len=4)
    assert caught.value.axis == "tp"
    assert "Invariant mixes with nothing" in caught.value.rule


@pytest.mark.parametrize("name", ["C3", "C4"])
def test_an_early_reduction_inside_the_region_is_refused(name: str) -> None:
    """#1878: d_routed reduced at the experts; P -> I there cannot meet the gates' R."""
    with set_current_mesh(BY_NAME[name].dense_mesh()), typecheck():
        rows = assert_type(torch.ones(4, 8), {"dp": R, "tp": P})
        gates = assert_type(torch.ones(4, 1), {"dp": R, "tp": R})
        early = all_reduce(rows, "tp", src=P, dst=I)
        with pytest.raises(PlacementError, match="Invariant mixes with nothing"):
            early * gates


@pytest.mark.parametrize("name", BY_NAME)
def test_a_forgotten_boundary_is_refused(name: str) -> None:
    """x that is not gathered or converted on the way in cannot enter the experts."""
    parallel = BY_NAME[name]
    with set_current_mesh(parallel.dense_mesh()), typecheck():
        x = assert_type(torch.ones(4, 8), {"dp": S(0), "tp": I})
        w1 = assert_type(torch.ones(4, 8), {"dp": R, "tp": S(0)})
        with pytest.raises(PlacementError, match="Invariant mixes with nothing"):
            linear(x, w1)
        y = assert_type(torch.ones(3, 8), {"dp": S(0), "tp": S(0, Padded(5))})
        with pytest.raises(PlacementError):
            linear(y, w1)


def trained(
    case: Case, steps: int, rate: float = 0.05
) -> tuple[list[float], dict[str, Tensor]]:
    """SGD on a fixed batch; the losses, and this rank's parameters at the end."""
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        optimizer = torch.optim.SGD(moe.parameters(), lr=rate)
        x = case.tensors()[0]
        if dense is not None:
            x = split(x, moe.layout.input, dense)[dist.get_rank()]
        losses: list[float] = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = moe(x, seq_len=case.seq_len).square().sum()
            loss.backward()
            reduce_gradients(moe, meshes=(dense, sparse) if dense is not None else None)
            optimizer.step()
            update_expert_bias(moe)
            losses.append(float(loss.detach()))
        return losses, copy.deepcopy(dict(moe.state_dict()))


def losses_of(runs: list[tuple[list[float], object]], case: Case) -> Tensor:
    """The loss of each step over all ranks: shares add up; I repeats them."""
    shares = torch.tensor([losses for losses, _ in runs], dtype=torch.float64)
    if not case.parallel.sequence_parallel:
        shares = shares[:: case.parallel.tp]
    return shares.sum(0)


@pytest.mark.parametrize("parallel", PARALLELS[1:], ids=named)
def test_t4_gates_are_bit_identical_after_a_step(parallel: Parallel) -> None:
    case = Case(parallel, seq_len=5)
    runs = run_ranks(parallel.dense_mesh(), trained, case, 2)
    first = runs[0][1]
    for _, state in runs[1:]:
        for name in ("router.w_gate_ED", "router.balance.expert_bias_E"):
            assert torch.equal(state[name], first[name]), name
    one = replace(case, parallel=Parallel(), batch=case.batch * parallel.dp)
    wanted, weights = trained(one, 2)
    losses = torch.tensor(wanted, dtype=torch.float64)
    torch.testing.assert_close(losses_of(runs, case), losses, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        first["router.w_gate_ED"], weights["router.w_gate_ED"], rtol=1e-10, atol=1e-10
    )


def test_the_reference_has_a_gradient_everywhere() -> None:
    """The oracle is not vacuous."""
    step = on_one_device(Case(Parallel()))
    assert all(g.abs().max() > 1e-3 for g in step.gradients.values())
