"""The same code on real processes: gloo, world sizes 2 and 4, and 8 in the deep run."""

import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from placements.testing import RankFailure, run_ranks
from spmd_moe import Parallel
from spmd_moe.layouts import CONFIGURATIONS, configuration
from tests.spmd_moe.test_layer_gradients import losses_of, trained
from tests.support.moe import (
    CONFIG,
    PARALLELS,
    Case,
    Step,
    assert_equals_one_device,
    build,
    meshes,
    on_ranks,
    on_this_rank,
)


def several(cases: list[Case]) -> list[Step]:
    return [on_this_rank(case) for case in cases]


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.deep)])
def test_every_configuration_equals_one_device_and_the_simulator(ranks: int) -> None:
    fitting = [p for p in PARALLELS if p.num_ranks == ranks]
    cases = [Case(p, checked=k % 2 == 0) for k, p in enumerate(fitting)]
    results = run_ranks(ranks, several, cases, backend="gloo")
    for k, case in enumerate(cases):
        steps = [rank[k] for rank in results]
        assert_equals_one_device(case, steps)
        for real, simulated in zip(steps, on_ranks(case), strict=True):
            assert real.collectives == simulated.collectives
            torch.testing.assert_close(real.y, simulated.y, rtol=1e-12, atol=1e-12)
    if ranks == 4:
        assert {configuration(p) for p in fitting} == set(CONFIGURATIONS)


def test_twenty_steps_leave_gates_bit_identical_and_losses_right() -> None:
    parallel = Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)
    config = replace(CONFIG, num_experts=8, load_balance_coeff=1e-3)
    case = Case(parallel, config, seq_len=5, dtype=torch.float32)
    runs = run_ranks(parallel.dense_mesh(), trained, case, 20, 1e-3, backend="gloo")
    for _, state in runs[1:]:
        for name in ("router.w_gate_ED", "router.balance.expert_bias_E"):
            assert torch.equal(state[name], runs[0][1][name]), name
    one = replace(case, parallel=Parallel(), batch=case.batch * parallel.dp)
    wanted = torch.tensor(trained(one, 20, 1e-3)[0], dtype=torch.float64)
    losses = losses_of(runs, case)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)


def dies(case: Case) -> None:
    """Rank 1 is gone in the middle of its forward; the others wait for its rows."""
    with meshes(case.parallel) as (_, sparse):
        moe = build(case, sparse)
        if dist.get_rank() == 1:
            moe.experts.register_forward_pre_hook(lambda *_: os._exit(3))
        x = torch.randn(1, 2, 8, dtype=case.dtype)
        moe(x, seq_len=4)


def test_a_killed_rank_ends_the_others_with_its_name() -> None:
    case = Case(Parallel(tp=2, ep=2, sequence_parallel=True))
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1"):
        run_ranks(case.parallel.dense_mesh(), dies, case, backend="gloo", timeout=20.0)
    assert time.monotonic() - start < 60
