"""The layer against the one-device reference: values, d_x, every gradient, on ranks."""

import itertools
from contextlib import nullcontext
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings

from placements import (
    Mesh,
    assert_type,
    gradient_axes,
    reduce_gradients,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import (
    AllToAllDispatcher,
    MoE,
    MoEConfig,
    Parallel,
    reference_moe,
    update_expert_bias,
)
from spmd_moe.layouts import configuration
from tests.support.moe import (
    CONFIG,
    PARALLELS,
    Case,
    assert_equals_one_device,
    build,
    meshes,
    on_ranks,
    on_this_rank,
    whole,
)


def named(parallel: Parallel) -> str:
    sizes = {**parallel.dense_mesh(), **parallel.sparse_mesh()}
    text = " ".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1)
    return f"{configuration(parallel)} {text}"


@st.composite
def configs(draw: st.DrawFn) -> MoEConfig:
    groups = draw(st.sampled_from([None, None, 2]))
    limit = None if groups is None else draw(st.integers(1, groups))
    most = 4 if limit is None else 2 * limit
    return MoEConfig(
        dim=8,
        hidden_dim=4,
        num_experts=4,
        top_k=draw(st.integers(1, most)),
        num_shared_experts=draw(st.integers(0, 1)),
        score_function=draw(st.sampled_from(["sigmoid", "softmax"])),
        route_norm=draw(st.booleans()),
        route_scale=draw(st.sampled_from([1.0, 2.5])),
        score_before_experts=draw(st.booleans()),
        num_expert_groups=groups,
        num_limited_groups=limit,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    config = draw(configs())
    favoured = draw(st.sampled_from([(), (), (0,), (3,), (1, 2), (0, 1, 2)]))
    return Case(
        parallel=draw(st.sampled_from(PARALLELS)),
        config=config,
        batch=draw(st.integers(0, 3)),
        seq_len=draw(st.integers(0, 7)),
        favoured=favoured,
        seed=draw(st.integers(0, 5)),
        checked=draw(st.booleans()),
    )


ALL_TO_ONE = replace(CONFIG, top_k=1)


@settings(
    max_examples=max(settings().max_examples // 10, 150),
    suppress_health_check=list(HealthCheck),
)
@given(cases())
@example(Case(PARALLELS[2], seq_len=1))  # L < tp: a rank without tokens
@example(Case(PARALLELS[7], seq_len=1))
@example(Case(PARALLELS[2], seq_len=0))
@example(Case(PARALLELS[2], batch=2, seq_len=5))  # upstream's merged versions fail this
@example(Case(PARALLELS[10], batch=2, seq_len=6))  # valid [2, 2, 2, 0]
@example(Case(PARALLELS[8], ALL_TO_ONE, favoured=(3,)))  # experts and ranks without rows
@example(Case(PARALLELS[8], replace(CONFIG, top_k=4)))  # K = E
def test_layer_equals_one_device(case: Case) -> None:
    assert_equals_one_device(case, on_ranks(case))


@pytest.mark.parametrize("parallel", PARALLELS, ids=named)
@pytest.mark.parametrize("score_before_experts", [False, True])
def test_every_configuration_type_checks_and_equals_one_device(
    parallel: Parallel, score_before_experts: bool
) -> None:
    config = replace(CONFIG, score_before_experts=score_before_experts)
    case = Case(parallel, config, seq_len=7)
    assert_equals_one_device(case, on_ranks(case))


@pytest.mark.parametrize("parallel", PARALLELS, ids=named)
def test_checking_changes_no_bit_and_no_collective(parallel: Parallel) -> None:
    case = Case(parallel)
    checked, unchecked = on_ranks(case), on_ranks(replace(case, checked=False))
    for a, b in zip(checked, unchecked, strict=True):
        assert torch.equal(a.y, b.y) and torch.equal(a.d_x, b.d_x)
        assert a.collectives == b.collectives
        for name, gradient in a.gradients.items():
            assert torch.equal(gradient, b.gradients[name]), name


def test_the_same_seed_gives_the_same_bits() -> None:
    case = Case(PARALLELS[6])
    for a, b in zip(on_ranks(case), on_ranks(case), strict=True):
        assert torch.equal(a.y, b.y) and torch.equal(a.d_x, b.d_x)


@pytest.mark.parametrize("parallel", PARALLELS, ids=named)
def test_global_weights_do_not_depend_on_the_mesh(parallel: Parallel) -> None:
    case = Case(parallel, seed=3)
    steps = on_ranks(case)
    again = on_ranks(replace(case, parallel=Parallel(), batch=case.batch * parallel.dp))
    torch.testing.assert_close(whole(steps, case)[0], again[0].y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("parallel", PARALLELS[2:], ids=named)
def test_a_zero_token_rank_has_zero_gradients_not_none(parallel: Parallel) -> None:
    case = Case(parallel, batch=1, seq_len=1)
    for step in on_ranks(case):  # on_this_rank asserts that no gradient is None
        assert all(torch.isfinite(g).all() for g in step.gradients.values())
    assert_equals_one_device(case, on_ranks(case))


@pytest.mark.parametrize("parallel", PARALLELS[2:], ids=named)
def test_experts_without_rows_have_zero_gradients_not_none(parallel: Parallel) -> None:
    case = Case(parallel, ALL_TO_ONE, favoured=(2,))
    _, _, gradients = whole(on_ranks(case), case)
    for name in ("w1_GFD", "w3_GFD", "w2_GDF"):
        by_expert = gradients[f"experts.{name}"].flatten(1).abs().sum(1)
        assert by_expert[2] > 0 and by_expert[[0, 1, 3]].sum() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parallel", [PARALLELS[0], PARALLELS[6], PARALLELS[14]], ids=named)
def test_other_dtypes_work(parallel: Parallel, dtype: torch.dtype) -> None:
    """bf16 rounds, and the two sides sum in other orders; routing is fixed by the bias."""
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    case = Case(parallel, favoured=(0, 3), dtype=dtype)
    assert_equals_one_device(case, on_ranks(case), rtol=tolerance)


def test_one_process_needs_no_mesh() -> None:
    case = Case(Parallel(), batch=2, seq_len=3)
    assert_equals_one_device(case, [on_this_rank(case)])


def made_without_a_sparse_mesh(case: Case) -> torch.Tensor:
    with meshes(case.parallel) as (dense, _):
        moe = build(case)
        assert isinstance(moe.dispatcher, AllToAllDispatcher)
        assert moe.dispatcher.mesh.sizes == case.parallel.sparse_mesh()
        x = split(case.tensors()[0], moe.layout.input, dense)[dist.get_rank()]
        return moe(x, seq_len=case.seq_len).detach()


def test_a_layer_makes_its_own_sparse_mesh() -> None:
    case = Case(PARALLELS[6])
    found = run_ranks(case.parallel.dense_mesh(), made_without_a_sparse_mesh, case)
    for y, step in zip(found, on_ranks(case), strict=True):
        assert torch.equal(y, step.y)


def test_weights_follow_the_coordinate_of_a_mesh_of_sizes() -> None:
    parallel = PARALLELS[14]  # ep=2 over dp, etp=2 over tp
    whole = MoE(CONFIG).experts.w1_GFD
    for dp, tp in itertools.product(range(2), range(2)):
        mesh = Mesh(parallel.dense_mesh(), {"dp": dp, "tp": tp})
        with set_current_mesh(mesh):
            mine = MoE(CONFIG, parallel).experts.w1_GFD
        expected = whole[2 * dp : 2 * dp + 2, 2 * tp : 2 * tp + 2]
        assert torch.equal(mine, expected)


def test_types_hold_for_thousands_of_ranks_in_one_process() -> None:
    """Sizes alone: nothing communicates, every op and boundary is checked."""
    parallel = Parallel(dp=64, cp=8, tp=16, ep=64, sequence_parallel=True)
    config = replace(CONFIG, num_experts=128, num_shared_experts=4)
    with set_current_mesh(parallel.dense_mesh()), typecheck():
        moe = MoE(config, parallel)
        x = torch.randn(1, 2, 8, requires_grad=True)
        assert_type(x, moe.input_types(256))
        moe(x, seq_len=256).sum().backward()


@pytest.mark.parametrize(
    ("mesh", "seq_len", "words"),
    [
        ({"dp": 1, "cp": 1, "tp": 2}, 7, "must have 4 positions"),
        ({"dp": 1, "cp": 1, "tp": 4}, 5, "must have the sizes of the layer"),
        (None, 5, "must have the sizes of the layer"),
    ],
)
def test_wrong_lengths_and_meshes_are_refused(
    mesh: dict[str, int] | None, seq_len: int, words: str
) -> None:
    parallel = Parallel(tp=2, sequence_parallel=True)
    with set_current_mesh(parallel.dense_mesh()):
        moe = build(Case(parallel))
    with set_current_mesh(mesh), pytest.raises(ValueError, match=words):
        moe(torch.randn(2, 3, 8, dtype=torch.float64), seq_len=seq_len)


def test_seq_len_is_required() -> None:
    with pytest.raises(TypeError, match="seq_len"):
        MoE(CONFIG)(torch.randn(2, 3, 8))


ABSENT = [
    (Parallel(dp=2), {"dp": 2}),
    (Parallel(tp=2), {"tp": 2}),
    (Parallel(tp=2, sequence_parallel=True), {"tp": 2}),
    (Parallel(dp=2, ep=2), {"dp": 2}),
    (Parallel(cp=2, ep=2), {"cp": 2}),
    (Parallel(dp=2, tp=2, ep=2, sequence_parallel=True), {"dp": 2, "tp": 2}),
]


def on_a_mesh_of(case: Case, sizes: dict[str, int]) -> list[torch.Tensor]:
    """A step on a dense mesh with these axes only; output, gradients and bias."""
    dense = device_mesh(sizes)
    with set_current_mesh(dense):
        moe = build(case)
        types = {a: t for a, t in moe.input_types(case.seq_len).items() if a in sizes}
        x, weights = (split(t, types, dense)[dist.get_rank()] for t in case.tensors())
        with typecheck() if case.checked else nullcontext():
            assert_type(x.requires_grad_(), moe.input_types(case.seq_len))
            assert_type(weights, types)
            y = moe(x, seq_len=case.seq_len)
            (y * weights).sum().backward()
        reduce_gradients(moe, meshes=moe.meshes)
        with typecheck() if case.checked else nullcontext():
            update_expert_bias(moe)
        assert x.grad is not None
        gradients = [p.grad for p in moe.parameters() if p.grad is not None]
        return [y.detach(), x.grad, *gradients, moe.router.balance.expert_bias_E]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("parallel", "sizes"), ABSENT, ids=str)
def test_axes_of_one_rank_may_be_absent(
    parallel: Parallel, sizes: dict[str, int], checked: bool
) -> None:
    config = replace(CONFIG, load_balance_coeff=1e-3)
    case = Case(parallel, config, checked=checked)
    whole = parallel.dense_mesh()
    expected = run_ranks(whole, on_a_mesh_of, case, whole)
    for found, wanted in zip(
        run_ranks(sizes, on_a_mesh_of, case, sizes), expected, strict=True
    ):
        for a, b in zip(found, wanted, strict=True):  # gradients are added in another order
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"tp": 1}, {"x": 1}])
def test_one_device_may_have_any_axes_of_one_rank(
    mesh: dict[str, int], checked: bool
) -> None:
    moe = build(Case(Parallel(), replace(CONFIG, load_balance_coeff=1e-3)))
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    expected = moe(x, seq_len=5)
    with set_current_mesh(mesh), typecheck() if checked else nullcontext():
        assert torch.equal(moe(x, seq_len=5), expected)
        update_expert_bias(moe)


def of_more_dims(case: Case) -> torch.Tensor:
    """The case with its batch seen as two dims."""
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        whole = case.tensors()[0].unflatten(0, (-1, 3))
        x = split(whole, moe.layout.input, dense)[dist.get_rank()]
        with typecheck() if case.checked else nullcontext():
            assert_type(x, moe.input_types(case.seq_len))
            y = moe(x, seq_len=case.seq_len)
        assert y.shape == x.shape
        return y.detach().flatten(0, 1)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("parallel", PARALLELS[1:], ids=named)
def test_an_input_may_have_more_leading_dims(parallel: Parallel, checked: bool) -> None:
    case = Case(parallel, batch=6, seq_len=5, checked=checked)
    found = run_ranks(parallel.dense_mesh(), of_more_dims, case)
    for y, step in zip(found, on_ranks(case), strict=True):
        torch.testing.assert_close(y, step.y, rtol=1e-12, atol=1e-12)


def test_an_input_of_one_dim_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x of shape \(8,\) must have the dims \(T, D\)"):
        MoE(CONFIG)(torch.randn(8), seq_len=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("logit", [-40.0, -200.0])
def test_the_reference_normalises_vanishing_scores_as_the_layer_does(
    dtype: torch.dtype, logit: float
) -> None:
    config = replace(CONFIG, route_norm=True, top_k=4)  # all: there is nothing to choose
    moe = MoE(config, dtype=dtype)
    with torch.no_grad():
        moe.router.w_gate_ED.fill_(logit / 8)
    x = torch.ones(1, 8, dtype=dtype)
    y, expected = moe(x, seq_len=1), reference_moe(x, moe.state_dict(), config)
    assert y.isfinite().all()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parallel", PARALLELS, ids=named)
def test_a_layer_says_on_which_meshes_its_parameters_live(parallel: Parallel) -> None:
    with set_current_mesh(parallel.dense_mesh()):
        moe = MoE(CONFIG, parallel)
    sparse = [parallel.sparse_mesh()] if parallel.ep > 1 else []
    assert [mesh.sizes for mesh in moe.meshes] == [parallel.dense_mesh(), *sparse]
    axes = gradient_axes(moe, meshes=moe.meshes)
    assert axes.keys() == dict(moe.named_parameters()).keys()
