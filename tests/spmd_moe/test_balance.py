"""Counts and the expert bias: summed over exactly the axes that the type says, once."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from placements import S, assert_type, ledger, set_current_mesh, split, typecheck
from placements.testing import run_ranks
from spmd_moe import MoE, Parallel, update_expert_bias
from tests.spmd_moe.test_layouts import BY_NAME
from tests.support.moe import CONFIG, PARALLELS, Case, build, meshes, on_ranks

COEFF = 0.5
BALANCED = replace(CONFIG, load_balance_coeff=COEFF)


def updated(case: Case, counts: list[list[int]]) -> tuple[Tensor, dict, bool]:
    with meshes(case.parallel) as (_, sparse), ledger() as record:
        moe = build(case, sparse)
        bias, own = moe.router.balance.expert_bias_E, moe.router.balance.counts_E
        own.copy_(torch.tensor(counts[dist.get_rank()]))
        with typecheck():
            update_expert_bias(moe)
        same = moe.router.balance.expert_bias_E is bias and not own.any()
    return bias.clone(), dict(record.counts()), same


def test_counts_are_summed_over_tp_where_tokens_are_split() -> None:
    case = Case(Parallel(tp=2, ep=2, sequence_parallel=True), BALANCED)
    for bias, sent, in_place in run_ranks(
        {"dp": 1, "cp": 1, "tp": 2}, updated, case, [[3, 1, 0, 0], [1, 1, 2, 0]]
    ):
        assert bias.tolist() == [-COEFF, 0.0, 0.0, COEFF]
        assert sent == {("tp", "all-reduce"): 1}
        assert in_place


def test_counts_are_not_summed_over_tp_where_tokens_are_shared() -> None:
    case = Case(Parallel(tp=2), BALANCED)
    for bias, sent, _ in run_ranks(
        {"dp": 1, "cp": 1, "tp": 2}, updated, case, [[5, 1, 1, 1], [5, 1, 1, 1]]
    ):
        c = COEFF
        assert bias.tolist() == [-1.5 * c, 0.5 * c, 0.5 * c, 0.5 * c]
        assert sent == {}


@pytest.mark.parametrize("name", BY_NAME)
def test_counts_exclude_pads_and_sum_to_the_slots(name: str) -> None:
    """Joined over the Partial axes they are the counts of one device; C3 to C5: per dp."""
    case = Case(BY_NAME[name], BALANCED, batch=2, seq_len=5)
    steps = on_ranks(case)
    one = on_ranks(replace(case, parallel=Parallel(), batch=4))[0]
    every = torch.stack([step.counts_E for step in steps]).view(2, 2, -1)
    total = every.sum((0, 1)) if name in ("C1", "C2") else every.sum(0)[0]
    assert torch.equal(total, one.counts_E)
    assert int(total.sum()) == 4 * 5 * 2


class Checkpointed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self, moe: MoE, reentrant: bool) -> None:
        super().__init__()
        self.moe, self.reentrant = moe, reentrant

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return self.moe(x, seq_len=5)

        return checkpoint(run, x, use_reentrant=self.reentrant)  # type: ignore[return-value]


def recomputed(case: Case, reentrant: bool | None) -> tuple[Tensor, Tensor, Tensor]:
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        x = split(case.tensors()[0], moe.layout.input, dense)[dist.get_rank()]
        with typecheck():
            assert_type(x.requires_grad_(), moe.input_types(5))
            if reentrant is None:
                y = moe(x, seq_len=5)
            else:
                y = Checkpointed(moe, reentrant)(x)
            y.sum().backward()
    assert x.grad is not None and moe.router.w_gate_ED.grad is not None
    return moe.router.balance.counts_E.clone(), x.grad, moe.router.w_gate_ED.grad


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["C1", "C3", "C5"])
def test_recomputation_counts_once(name: str, reentrant: bool) -> None:
    case = Case(BY_NAME[name], BALANCED)
    mesh = case.parallel.dense_mesh()
    plain = run_ranks(mesh, recomputed, case, None)
    again = run_ranks(mesh, recomputed, case, reentrant)
    for a, b in zip(plain, again, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)


def test_eval_counts_nothing() -> None:
    moe = MoE(replace(BALANCED, top_k=1, num_experts=2))
    moe.router.balance.expert_bias_E.copy_(torch.tensor([100.0, 0.0]))
    x = torch.randn(6, 8)
    moe(x, seq_len=6)
    assert moe.router.balance.counts_E.tolist() == [6, 0]
    moe.eval()(x, seq_len=6)
    assert moe.router.balance.counts_E.tolist() == [6, 0]


def test_coeff_is_for_all_layers_or_for_none() -> None:
    layers = nn.ModuleList([MoE(BALANCED), MoE(CONFIG)])
    with pytest.raises(ValueError, match=r"load_balance_coeff \(None\) of '1.router"):
        update_expert_bias(layers)
    update_expert_bias(MoE(CONFIG))  # none: nothing to do


def test_bias_balances_a_skewed_router() -> None:
    torch.manual_seed(0)
    moe = MoE(replace(CONFIG, load_balance_coeff=0.01, top_k=1))
    x = torch.randn(64, 8) + 1.0
    spread: list[float] = []
    for _ in range(60):
        moe(x, seq_len=64)
        spread.append(float(moe.router.balance.counts_E.double().std()))
        update_expert_bias(moe)
    assert spread[-1] < spread[0] / 2


def test_every_parallel_declares_the_counts() -> None:
    for parallel in PARALLELS:
        with set_current_mesh(parallel.dense_mesh()):
            moe = MoE(BALANCED, parallel)
        types = moe.layout.counts_E
        assert types["dp"].letter == types["cp"].letter == "P"
        split = parallel.ep > 1 and parallel.etp == 1
        assert types["tp"].letter == ("P" if split else "R")


class Model(nn.Module):
    """A layer somewhere in a model."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x, seq_len=5)


def summing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def counted(case: Case, ddp: bool) -> tuple[list[int], list[float]]:
    with meshes(case.parallel) as (dense, sparse):
        model: nn.Module = Model(build(case, sparse))
        balance = model.moe.router.balance  # type: ignore[union-attr]
        if ddp:
            model = nn.parallel.DistributedDataParallel(model)
            model.register_comm_hook(None, summing)  # an average would be refused
        x = split(case.tensors()[0], {"dp": S(0)}, dense)[dist.get_rank()]
        for step in range(3):
            model(x + step).sum().backward()
        counts = balance.counts_E.tolist()
        update_expert_bias(model)
        return counts, balance.expert_bias_E.tolist()


def test_ddp_leaves_every_rank_its_own_counts() -> None:
    """It sends the buffers of rank 0 to all ranks before each forward."""
    case = Case(Parallel(dp=2), BALANCED)
    mesh = case.parallel.dense_mesh()
    plain, wrapped = (run_ranks(mesh, counted, case, ddp) for ddp in (False, True))
    assert plain == wrapped
    assert plain[0][0] != plain[1][0]


@pytest.mark.parametrize("mesh", [None, {"dp": 4}, {"edp": 1, "ep": 2, "etp": 1}])
def test_a_bias_is_not_updated_on_another_mesh(mesh: dict[str, int] | None) -> None:
    with set_current_mesh({"dp": 2}):
        moe = MoE(BALANCED, Parallel(dp=2))
    with set_current_mesh(mesh), pytest.raises(ValueError, match="must have the sizes"):
        update_expert_bias(moe)
