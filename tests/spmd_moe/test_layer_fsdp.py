"""The layer under FSDP2: equal to one device, however it is wrapped, checked or not."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import placements
from placements.testing import run_ranks
from spmd_moe import MoE, Parallel
from tests.support.moe import CONFIG, Case, meshes
from tests.support.sharded import (
    Run,
    Wrap,
    assert_trained_alike,
    by_hand,
    each_part,
    in_one_call,
    in_two_phases,
    trained,
)

SP = {"sequence_parallel": True}
PARALLELS = [
    Parallel(dp=2),
    Parallel(dp=2, ep=2),
    Parallel(dp=4),
    Parallel(dp=2, tp=2),
    Parallel(dp=2, tp=2, ep=2, **SP),
    Parallel(dp=2, tp=2, ep=2, etp=2, **SP),
    Parallel(dp=4, ep=2),
    Parallel(dp=4, ep=4),
    Parallel(dp=2, cp=2, ep=2),
    Parallel(tp=2, ep=2),
]
WRAPS: list[Wrap] = [in_one_call, in_two_phases, each_part, by_hand]


def ways(parallel: Parallel) -> list[Wrap]:
    return [w for w in WRAPS if w is not by_hand or parallel.cp == 1 < parallel.dp]


def every_way(parallel: Parallel, wraps: list[Wrap]) -> dict[str, Run]:
    return {
        f"{wrap.__name__}, checked={checked}": trained(
            Case(parallel, checked=checked), wrap
        )
        for wrap in wraps
        for checked in (True, False)
    }


# torch says so of the layer's result, a view, if it is wrapped by hand.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
@pytest.mark.parametrize("parallel", PARALLELS, ids=str)
@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_steps_equal_one_device_whichever_way_it_is_wrapped(
    parallel: Parallel, backend: Any
) -> None:
    wraps = ways(parallel) if backend == "gloo" else [in_one_call]
    ranks = run_ranks(parallel.dense_mesh(), every_way, parallel, wraps, backend=backend)
    for way in ranks[0]:
        runs = [rank[way] for rank in ranks]
        assert all(all(run.shards.values()) for run in runs), way
        assert_trained_alike(Case(parallel), runs)


# mesh, options: whole copies of some or all ranks of an axis
HSDP: list[tuple[Parallel, dict[str, Any]]] = [
    (Parallel(dp=2, cp=2), {"replicate": ("dp",)}),
    (Parallel(dp=2, cp=2), {"replicate": ("cp",)}),
    (Parallel(dp=4), {"replicate": {"dp": 2}}),
    (Parallel(dp=4), {"replicate": ("dp",)}),
    (Parallel(dp=4, ep=2), {"replicate": {"dp": 2, "edp": 2}}),
    (Parallel(dp=4, ep=2), {"replicate": {"dp": 2}}),
    (Parallel(dp=2, cp=2, ep=2), {"replicate": {"dp": 2, "cp": 2}}),
    (Parallel(dp=2, tp=2, ep=2, **SP), {"shard": ("edp",)}),
]


def copied(parallel: Parallel, options: dict[str, Any]) -> list[Run]:
    return [
        trained(Case(parallel, checked=wrap is in_one_call), wrap, options)
        for wrap in (in_one_call, in_two_phases)
    ]


@pytest.mark.parametrize(("parallel", "options"), HSDP, ids=str)
def test_copies_and_shards(parallel: Parallel, options: dict[str, Any]) -> None:
    ranks = run_ranks(parallel.dense_mesh(), copied, parallel, options)
    for runs in zip(*ranks, strict=True):
        assert_trained_alike(Case(parallel), list(runs))


def test_copies_and_shards_on_processes() -> None:
    parallel, options = HSDP[4]
    for runs in zip(*run_ranks(4, copied, parallel, options, backend="gloo"), strict=True):
        placed = {"router.w_gate_ED": 2, "experts.w1_GFD": 2}
        assert {name: len(runs[0].shards[name]) for name in placed} == placed
        assert_trained_alike(Case(parallel), list(runs))


@pytest.mark.parametrize("checked", [True, False])
def test_gradients_are_accumulated_before_they_are_reduced(checked: bool) -> None:
    parallel = Parallel(dp=2, tp=2, ep=2, **SP)
    case = Case(parallel, checked=checked)
    args = (case, in_one_call, None, 2, 3)
    runs = run_ranks(parallel.dense_mesh(), trained, *args, backend="gloo")
    assert_trained_alike(case, runs, 2, 3)


def dims(parallel: Parallel, num_experts: int) -> dict[str, int]:
    config = replace(CONFIG, num_experts=num_experts, hidden_dim=8)
    with meshes(parallel) as (_, sparse):
        moe = MoE(config, parallel, sparse_mesh=sparse)
        placements.fully_shard(moe, meshes=moe.meshes)
    return {name: _dim(p) for name, p in moe.named_parameters()}


def _dim(parameter: Any) -> int:
    (placement,) = parameter.placements
    assert isinstance(placement, Shard)
    return placement.dim


@pytest.mark.parametrize(
    ("parallel", "num_experts", "dim"),
    [
        (Parallel(dp=8), 4, 1),
        (Parallel(dp=8), 8, 0),
        (Parallel(dp=8, ep=2), 4, 1),
        (Parallel(dp=8, ep=2), 8, 0),
    ],
)
def test_experts_are_cut_along_the_hidden_dim_if_ranks_outnumber_them(
    parallel: Parallel, num_experts: int, dim: int
) -> None:
    for found in run_ranks(parallel.dense_mesh(), dims, parallel, num_experts):
        assert {found[f"experts.{name}"] for name in ("w1_GFD", "w2_GDF")} == {dim}


def late(parallel: Parallel) -> dict[str, torch.Tensor]:
    with meshes(parallel) as (_, sparse):
        moe = MoE(CONFIG, parallel, sparse_mesh=sparse, seed=3, device="meta")
        placements.fully_shard(moe, meshes=moe.meshes)
        moe.to_empty(device="cpu")
        moe.reset_parameters()
        assert moe.router.balance.expert_bias_E.tolist() == [0.0] * 4
        found: dict[str, torch.Tensor] = {}
        made = MoE(CONFIG, parallel, sparse_mesh=sparse, seed=3)
        for (name, p), wanted in zip(
            moe.named_parameters(), made.parameters(), strict=True
        ):
            assert isinstance(p, DTensor)
            assert torch.equal(p.detach().full_tensor(), wanted), (name, dist.get_rank())
            found[name] = wanted.detach()
        x = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        assert torch.equal(moe(x, seq_len=4), made(x, seq_len=4))
    return found


def test_a_layer_on_the_meta_device_is_sharded_first_and_filled_then() -> None:
    parallel = Parallel(dp=2, tp=2, ep=2, **SP)
    run_ranks(parallel.dense_mesh(), late, parallel)
    run_ranks(parallel.dense_mesh(), late, parallel, backend="gloo")
