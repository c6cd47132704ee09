"""The layer compiled as one graph: outputs and gradients are those of eager mode."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from placements import Mesh, assert_type, set_current_mesh, split, type_of, typecheck
from placements.testing import run_ranks
from spmd_moe import MoE, Parallel
from spmd_moe.compute.by_expert import ByExpert, Plain
from spmd_moe.layouts import configuration
from tests.support.compiled import same, traced, whole
from tests.support.moe import CONFIG, Case, build, meshes

PARALLELS = (
    Parallel(),
    Parallel(tp=2, ep=2, sequence_parallel=True),
    Parallel(tp=2, ep=2),
    Parallel(tp=2, sequence_parallel=True),
    Parallel(tp=2),
    Parallel(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
)


@pytest.fixture(autouse=True)
def nothing_was_compiled() -> None:
    torch._dynamo.reset()


def step(function: Any, moe: MoE, x: Tensor, weights: Tensor, seq_len: int) -> list[Tensor]:
    """Output, d_x, gradients and counts of one step."""
    moe.zero_grad()
    moe.router.balance.counts_E.zero_()
    x = x.clone().requires_grad_()
    y = function(x, seq_len=seq_len)
    (y * weights).sum().backward()
    gradients = [x.grad, *(p.grad for p in moe.parameters())]
    return [y.detach(), *map(_clone, gradients), moe.router.balance.counts_E.clone()]


def _clone(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.clone()


def compare(cases: list[Case]) -> tuple[list[bool], int]:
    """For each case whether both agree to the bit; and how many graphs there are then.

    Compiled code computes the experts by the plain ops, so eager mode does the same here.
    Its own way, expert by expert, rounds otherwise, by an ulp or two.
    """
    found: list[bool] = []
    with meshes(cases[0].parallel) as (dense, sparse), traced() as graphs:
        moe = build(cases[0], sparse)
        compiled = whole(moe)
        rank = dist.get_rank() if dense else 0
        for case in cases:
            moe.router.balance.expert_bias_E.copy_(case.bias())
            mesh = dense or Mesh({})
            x, weights = (split(t, moe.layout.input, mesh)[rank] for t in case.tensors())
            # Compiled first: nothing that eager mode leaves behind may be needed.
            moe.experts.compute = ByExpert()
            got = step(compiled, moe, x, weights, case.seq_len)
            close = step(moe, moe, x, weights, case.seq_len)
            moe.experts.compute = Plain()
            found.append(same(got, step(moe, moe, x, weights, case.seq_len)))
            torch.testing.assert_close(got, close, rtol=1e-14, atol=1e-14)
    return found, graphs[0]


def compare_simulated(cases: list[Case]) -> int:
    """Assert that all ranks agree in all cases; the graphs of all ranks together."""
    mesh = cases[0].parallel.dense_mesh()
    with traced() as graphs:
        results = run_ranks(mesh, compare, cases, timeout=400)
    assert all(all(equal) for equal, _ in results), results
    return graphs[0]


@pytest.mark.parametrize("parallel", PARALLELS, ids=configuration)
def test_every_configuration_compiles_as_one_graph(parallel: Parallel) -> None:
    # Uneven lengths; the second step sends other rows, and none to some rank.
    case = Case(parallel)
    cases = [case, replace(case, favoured=(0, 1)), case]
    assert compare_simulated(cases) == parallel.num_ranks


def test_a_rank_without_tokens() -> None:
    case = Case(Parallel(tp=2, ep=2, sequence_parallel=True), seq_len=1)
    assert compare_simulated([case, case]) == 2


def test_lengths_become_symbols() -> None:
    cases = [Case(Parallel(), seq_len=n) for n in (5, 7, 8, 11, 6)]
    assert compare_simulated(cases) == 2  # one for the first length, one for all others


def test_on_processes() -> None:
    case = Case(Parallel(dp=2, ep=2))
    found = run_ranks({"dp": 2}, compare, [case, case], backend="gloo", timeout=400)
    assert found == [([True, True], 1)] * 2


def without_fullgraph(case: Case, scalars: bool) -> tuple[bool, int, int]:
    """Whether outputs and gradients are those of eager mode; graphs; breaks."""
    torch._dynamo.reset()  # of what a program before has compiled in this process
    breaks = sum(counters["graph_break"].values())
    settings = torch._dynamo.config.patch(capture_scalar_outputs=scalars)
    with meshes(case.parallel) as (dense, sparse), traced() as graphs, settings:
        moe = build(case, sparse)
        moe.experts.compute = Plain()  # as compiled code does
        assert dense is not None
        rank = dist.get_rank()
        x, weights = (split(t, moe.layout.input, dense)[rank] for t in case.tensors())
        compiled: Any = torch.compile(moe, backend="aot_eager")
        got = step(compiled, moe, x, weights, case.seq_len)
        equal = same(got, step(moe, moe, x, weights, case.seq_len))
    return equal, graphs[0], sum(counters["graph_break"].values()) - breaks


def test_without_fullgraph_it_breaks_where_splits_are_read_and_one_setting_mends_it() -> (
    None
):
    # On processes, so that nothing was run before.
    case = Case(Parallel(dp=2, ep=2))
    (equal, graphs, breaks), _ = run_ranks(
        {"dp": 2}, without_fullgraph, case, False, backend="gloo", timeout=400
    )
    assert equal and graphs > 1 and breaks > 0
    found = run_ranks({"dp": 2}, without_fullgraph, case, True, backend="gloo", timeout=400)
    assert found == [(True, 1, 0)] * 2


def test_recomputation_counts_no_token_twice() -> None:
    moe = MoE(CONFIG)
    x = torch.randn(2, 5, CONFIG.dim, requires_grad=True)
    compiled = whole(moe)
    inside = whole(lambda x: checkpoint(moe, x, seq_len=5, use_reentrant=False))
    with set_current_mesh({}):
        for function in (
            lambda: checkpoint(compiled, x, seq_len=5, use_reentrant=False),
            lambda: checkpoint(lambda x: compiled(x, seq_len=5), x, use_reentrant=True),
            lambda: inside(x),
        ):
            moe.router.balance.counts_E.zero_()
            y: Any = function()
            y.sum().backward()
            assert moe.router.balance.counts_E.sum() == 2 * 5 * CONFIG.top_k


def test_in_a_block_the_compiled_layer_is_checked_and_stays_compiled() -> None:
    moe, x = MoE(CONFIG), torch.randn(2, 5, CONFIG.dim)
    moe.experts.compute = Plain()  # as compiled code does
    compiled = whole(moe)
    with set_current_mesh({"dp": 2}), pytest.raises(ValueError, match="sizes of the layer"):
        moe(x, seq_len=5)
    with set_current_mesh({}):
        before = compiled(x, seq_len=5)
        with traced() as graphs:
            with typecheck():
                y = compiled(assert_type(x, {}), seq_len=5)
                assert type_of(y) is not None
            assert torch.equal(compiled(x, seq_len=5), before)
    assert graphs == [0] and torch.equal(y, before)


def test_inductor() -> None:
    moe, x = MoE(CONFIG), torch.randn(2, 5, CONFIG.dim)
    with set_current_mesh({}):
        wanted = step(moe, moe, x, torch.ones_like(x), 5)
        with traced() as graphs:
            got = step(whole(moe, "inductor"), moe, x, torch.ones_like(x), 5)
    assert graphs == [1]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
