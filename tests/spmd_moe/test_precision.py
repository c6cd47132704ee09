"""Neither autocast nor a cast of the module changes which experts are chosen."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from placements import assert_type, reduce_gradients, set_current_mesh, split, typecheck
from placements.testing import run_ranks
from placements.types.axis import print_types
from spmd_moe import LocalDispatcher, MoE, Parallel, combine, update_expert_bias
from spmd_moe.compute.grouped_mm import grouped_mm
from spmd_moe.layouts import layout
from spmd_moe.permute import count_experts
from spmd_moe.precision import autocast_dtype, without_autocast
from spmd_moe.route import Routing
from tests.spmd_moe.test_layer import named
from tests.support.moe import (
    CONFIG,
    PARALLELS,
    Case,
    Step,
    assert_equals_one_device,
    build,
    declared_types,
    meshes,
    on_one_device,
)

# Switching kernels off and on again makes torch say this.
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")

NARROW = [torch.bfloat16, torch.float16]
MANY = replace(CONFIG, num_experts=32, top_k=4, num_shared_experts=0)


@contextmanager
def nested(dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cpu", dtype=dtype):
        yield


def cpu_and_cuda(dtype: torch.dtype) -> Any:
    """Both switched on, as where the device type is not known; without a GPU one warns."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    return torch.autocast("cpu", dtype=dtype)


@pytest.fixture(autouse=True)
def cuda_autocast_off() -> Iterator[None]:
    yield
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)


@pytest.fixture(autouse=True)
def plain_kernels() -> Iterator[None]:
    """Without the matrix units for bf16 that a CPU has and a sandbox may forbid."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


WAYS: dict[str, Callable[[torch.dtype], Any]] = {
    "plain": lambda dtype: torch.autocast("cpu", dtype=dtype),
    "uncached": lambda dtype: torch.autocast("cpu", dtype=dtype, cache_enabled=False),
    "nested": nested,
    "cpu and cuda": cpu_and_cuda,
}


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("way", WAYS)
def test_routing_under_autocast_is_routing_without_it(
    way: str, dtype: torch.dtype, function: str, checked: bool
) -> None:
    """Bit for bit: choice, gates, counts and the gradient of the gate's weight."""
    config = replace(MANY, score_function=function, route_norm=True)
    plain = MoE(config).router
    cast = copy.deepcopy(plain)
    x_TD = torch.randn(512, 8, generator=torch.Generator().manual_seed(2))
    expected = plain(x_TD)
    expected.gates_TK.square().sum().backward()
    with set_current_mesh({}), typecheck() if checked else nullcontext():
        with WAYS[way](dtype):
            scores_TE = cast.score(cast.logits(x_TD))
            found = cast(x_TD)
        found.gates_TK.square().sum().backward()
    assert scores_TE.dtype == found.gates_TK.dtype == torch.float32
    assert torch.equal(scores_TE, plain.score(plain.logits(x_TD)))
    assert torch.equal(found.expert_ids_TK, expected.expert_ids_TK)
    assert torch.equal(found.gates_TK, expected.gates_TK)
    assert torch.equal(found.counts_E, expected.counts_E)
    assert torch.equal(cast.balance.counts_E, plain.balance.counts_E)
    assert cast.w_gate_ED.grad is not None and plain.w_gate_ED.grad is not None
    assert torch.equal(cast.w_gate_ED.grad, plain.w_gate_ED.grad)


def under_autocast(
    case: Case, dtype: torch.dtype, reentrant: bool | None = None, narrow: bool = False
) -> Step:
    """The step as a training loop with mixed precision writes it.

    `narrow`: the layer's input comes from a product before it, in autocast's dtype.
    """
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        mesh, rank = (dense or {}), (dist.get_rank() if dense else 0)
        x, loss_weights = (split(t, moe.layout.input, mesh)[rank] for t in case.tensors())
        x.requires_grad_()

        def run(x: Tensor) -> Tensor:
            return moe(x.to(dtype) if narrow else x, seq_len=case.seq_len)

        with typecheck() if case.checked else nullcontext():
            types = moe.input_types(case.seq_len)
            assert_type(x, types)
            assert_type(loss_weights, types)
            with torch.autocast("cpu", dtype=dtype):
                y = run(x) if reentrant is None else None
                if reentrant is not None:
                    y = checkpoint(run, x, use_reentrant=reentrant)
            assert isinstance(y, Tensor) and y.dtype == dtype
            (y * loss_weights).sum().backward()
        reduce_gradients(moe, meshes=(dense, sparse) if dense else None)
    assert x.grad is not None and x.grad.dtype == torch.float32
    gradients: dict[str, Tensor] = {}
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        gradients[name] = parameter.grad.clone()
    counts_E = moe.router.balance.counts_E.clone()
    said = {name: print_types(types) for name, types in declared_types(moe)}
    return Step(
        y.detach().float(), x.grad, gradients, counts_E, said,
        print_types(moe.layout.input),
    )  # fmt: skip


def steps_under_autocast(case: Case, *args: Any) -> list[Step]:
    if case.parallel.num_ranks == 1:
        return [under_autocast(case, *args)]
    return run_ranks(case.parallel.dense_mesh(), under_autocast, case, *args)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("parallel", PARALLELS, ids=named)
def test_the_layer_works_under_autocast(
    parallel: Parallel, before: bool, checked: bool
) -> None:
    """Every configuration, within what bf16 rounds; the choice is that of float32."""
    config = replace(CONFIG, score_before_experts=before)
    case = Case(parallel, config, dtype=torch.float32, checked=checked)
    steps = steps_under_autocast(case, torch.bfloat16)
    assert_equals_one_device(case, steps, rtol=5e-2)


@pytest.mark.parametrize("parallel", PARALLELS, ids=named)
def test_a_checked_layer_takes_an_input_in_autocasts_dtype(parallel: Parallel) -> None:
    """As a projection before the layer gives it. Checking changes no bit of the step."""
    case = Case(parallel, dtype=torch.float32)
    plain = steps_under_autocast(case, torch.bfloat16, None, True)
    checked = steps_under_autocast(replace(case, checked=True), torch.bfloat16, None, True)
    for one, other in zip(plain, checked, strict=True):
        assert torch.equal(one.y, other.y) and torch.equal(one.d_x, other.d_x)
        assert one.gradients.keys() == other.gradients.keys()
        for name, gradient in one.gradients.items():
            assert torch.equal(gradient, other.gradients[name]), name


@pytest.mark.parametrize("parallel", [PARALLELS[0], PARALLELS[6]], ids=named)
def test_the_layer_works_under_autocast_to_float16(parallel: Parallel) -> None:
    case = Case(parallel, dtype=torch.float32)
    steps = steps_under_autocast(case, torch.float16)
    assert_equals_one_device(case, steps, rtol=5e-3)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("parallel", [PARALLELS[0], PARALLELS[6]], ids=named)
def test_recomputation_under_autocast_gives_the_same_bits(
    parallel: Parallel, reentrant: bool
) -> None:
    case = Case(parallel, dtype=torch.float32)
    plain = steps_under_autocast(case, torch.bfloat16)
    again = steps_under_autocast(case, torch.bfloat16, reentrant)
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a.y, b.y) and torch.equal(a.d_x, b.d_x)
        assert torch.equal(a.counts_E, b.counts_E)
        for name, gradient in a.gradients.items():
            assert torch.equal(gradient, b.gradients[name]), name


@pytest.mark.parametrize("weigh", [False, True])
def test_rows_are_weighed_and_summed_without_autocast(weigh: bool) -> None:
    """Numbers that bf16 would round, so the product must not be in it."""
    rows_ND = torch.tensor([[1.0], [2.0**-12]])
    gates_TK = torch.tensor([[1 + 2.0**-12, 1.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_TD = combine(rows_ND, gates_TK, layout("C4"), weigh=weigh)
    assert y_TD.item() == 1 + (2.0**-11 if weigh else 2.0**-12)


def test_narrow_gates_do_not_narrow_the_rows() -> None:
    rows_ND = torch.tensor([[1.0], [2.0**-12]])
    gates_TK = torch.ones(1, 2, dtype=torch.bfloat16)
    y_TD = combine(rows_ND, gates_TK, layout("C4"), weigh=True)
    assert y_TD.dtype == torch.float32 and y_TD.item() == 1 + 2.0**-12
    ids_TK = torch.tensor([[0, 1]])
    routing = Routing(gates_TK, ids_TK, count_experts(ids_TK, 2))
    x_TD = torch.tensor([[1 + 2.0**-12]])
    sent = LocalDispatcher(layout("C4"), score_before_experts=True).dispatch(x_TD, routing)
    assert sent.rows_MD.flatten().tolist() == [1 + 2.0**-12] * 2


@pytest.mark.parametrize("size", [4, 3])  # by F.grouped_mm, and by the loop
def test_grouped_mm_heeds_autocast_as_the_products_of_torch_do(size: int) -> None:
    rows_MK = torch.randn(6, size, requires_grad=True)
    matrices_GKN = torch.randn(2, size, size, requires_grad=True)
    ends_G = torch.tensor([2, 6], dtype=torch.int32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = grouped_mm(rows_MK, matrices_GKN, ends_G)
    first, second = rows_MK[:2] @ matrices_GKN[0], rows_MK[2:] @ matrices_GKN[1]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), torch.cat([first, second]), rtol=0, atol=0.1)
    gradients = torch.autograd.grad(found.float().sum(), [rows_MK, matrices_GKN])
    assert [g.dtype for g in gradients] == [torch.float32] * 2
    wide = rows_MK.double(), matrices_GKN.double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_mm(*wide, ends_G).dtype == torch.float64


@pytest.mark.parametrize("size", [4, 3])
def test_a_backward_inside_autocast_is_as_precise_as_one_outside(size: int) -> None:
    rows_MK = torch.randn(6, size, requires_grad=True)
    matrices_GKN = torch.randn(2, size, size, requires_grad=True)
    out_MN = grouped_mm(rows_MK, matrices_GKN, torch.tensor([2, 6], dtype=torch.int32))
    grads_MN, both = torch.randn(6, size), [rows_MK, matrices_GKN]
    outside = torch.autograd.grad(out_MN, both, grads_MN, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(out_MN, both, grads_MN)
    for a, b in zip(outside, inside, strict=True):
        assert torch.equal(a, b)


def test_rows_and_matrices_of_two_dtypes_are_refused() -> None:
    moe = MoE(CONFIG).bfloat16()
    with pytest.raises(
        TypeError, match=r"rows are torch\.float32 and the matrices torch\.b"
    ):
        moe(torch.randn(3, 8), seq_len=3)


def test_autocast_is_asked_for_the_device_of_the_tensor() -> None:
    x, meta = torch.ones(1), torch.ones(1, device="meta")
    assert autocast_dtype(x) is None
    with torch.autocast("cpu", dtype=torch.float16):
        assert autocast_dtype(x) == torch.float16
        assert autocast_dtype(meta) is None and autocast_dtype(x.long()) is None
        with without_autocast(x), without_autocast(meta):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


# --- Casts of the module ------------------------------------------------------------------


def parent(moe: MoE) -> nn.Module:
    return nn.ModuleDict({"block": nn.Sequential(nn.LayerNorm(8), moe)})


CASTS: dict[str, tuple[Callable[[nn.Module], object], torch.dtype]] = {
    "bfloat16": (lambda m: m.bfloat16(), torch.float32),
    "half": (lambda m: m.half(), torch.float32),
    "to dtype": (lambda m: m.to(torch.bfloat16), torch.float32),
    "to dtype=": (lambda m: m.to(dtype=torch.float16), torch.float32),
    "to device and dtype": (lambda m: m.to("cpu", torch.bfloat16), torch.float32),
    "to tensor": (lambda m: m.to(torch.ones(1).half()), torch.float32),
    "type": (lambda m: m.type(torch.float16), torch.float32),
    "of a parent": (lambda m: parent(m).bfloat16(), torch.float32),
    "float": (lambda m: m.float(), torch.float32),
    "double": (lambda m: m.double(), torch.float64),
    "double, bfloat16": (lambda m: m.double().bfloat16(), torch.float64),
    "double, float": (lambda m: m.double().float(), torch.float32),
    "bfloat16, float": (lambda m: m.bfloat16().float(), torch.float32),
    "copied": (lambda m: m.bfloat16(), torch.float32),
    "share_memory": (lambda m: m.share_memory(), torch.float32),
    "cpu": (lambda m: m.cpu(), torch.float32),
}


@pytest.mark.parametrize("flags", ["", "overwrite", "swap"])
@pytest.mark.parametrize("way", CASTS)
def test_bias_and_counts_keep_their_precision(way: str, flags: str) -> None:
    cast, expected = CASTS[way]
    moe = MoE(replace(CONFIG, load_balance_coeff=1e-3))
    bias_E = torch.tensor([1.0, 1 + 2.0**-20, 0.001, -3.0])
    moe.router.balance.expert_bias_E.copy_(bias_E)
    moe.router.balance.counts_E.fill_(2**40 + 1)
    torch.__future__.set_overwrite_module_params_on_conversion(flags == "overwrite")
    torch.__future__.set_swap_module_params_on_conversion(flags == "swap")
    try:
        cast(moe)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch.__future__.set_swap_module_params_on_conversion(False)
    balance = copy.deepcopy(moe).router.balance if way == "copied" else moe.router.balance
    assert balance.expert_bias_E.dtype == expected
    assert balance.expert_bias_E.tolist() == bias_E.tolist()
    assert balance.counts_E.dtype == torch.int64
    assert balance.counts_E.tolist() == [2**40 + 1] * 4
    dtype = moe.router.w_gate_ED.dtype
    moe(torch.randn(3, 8, dtype=dtype), seq_len=3)


def test_a_cast_moves_too() -> None:
    moe = MoE(CONFIG).to(device="meta", dtype=torch.bfloat16)
    balance = moe.router.balance
    assert balance.expert_bias_E.is_meta and balance.counts_E.is_meta
    assert balance.expert_bias_E.dtype == torch.float32
    moe.to_empty(device="cpu")
    assert moe.router.w_gate_ED.dtype == torch.bfloat16
    assert not balance.expert_bias_E.is_meta and not balance.counts_E.is_meta
    assert balance.expert_bias_E.dtype == torch.float32
    assert balance.counts_E.dtype == torch.int64


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double])
def test_a_small_step_moves_the_bias_of_a_cast_layer(cast: Any) -> None:
    moe = cast(MoE(replace(CONFIG, load_balance_coeff=1e-3)))
    balance = moe.router.balance
    balance.expert_bias_E.fill_(1.0)
    balance.counts_E.copy_(torch.tensor([0, 0, 2, 2]))
    with set_current_mesh({}), typecheck():
        update_expert_bias(moe)
    moved_E = torch.tensor([1.001, 1.001, 0.999, 0.999], dtype=torch.float64)
    torch.testing.assert_close(balance.expert_bias_E.double(), moved_E, rtol=0, atol=1e-6)


def test_counts_of_any_size_are_compared_exactly() -> None:
    """In float32 they would all be 2**40."""
    balance = MoE(replace(CONFIG, load_balance_coeff=0.5)).router.balance
    balance.counts_E.copy_(2**40 + torch.tensor([1, -1, 0, 0]))
    balance.update()
    assert balance.expert_bias_E.tolist() == [-0.5, 0.5, 0.0, 0.0]


def test_a_default_dtype_changes_no_step() -> None:
    balance = MoE(replace(CONFIG, load_balance_coeff=1e-3)).router.balance
    balance.counts_E.copy_(torch.tensor([0, 0, 2, 2]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        balance.update()
    finally:
        torch.set_default_dtype(torch.float32)
    step = torch.tensor(1e-3).item()
    assert balance.expert_bias_E.tolist() == [step, step, -step, -step]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [*NARROW, torch.float64])
def test_a_loaded_bias_is_wide_and_the_counts_start_again(
    dtype: torch.dtype, assign: bool
) -> None:
    moe = MoE(CONFIG)
    state = {name: value.to(dtype) for name, value in MoE(CONFIG).state_dict().items()}
    state["router.balance.expert_bias_E"].copy_(torch.tensor([0.5, 1.0, 2.0, 4.0]))
    held = moe.router.balance.counts_E.fill_(7)
    given = dict(state)
    moe.load_state_dict(state, assign=assign)
    balance = moe.router.balance
    expected = torch.float64 if assign and dtype == torch.float64 else torch.float32
    assert balance.expert_bias_E.dtype == expected
    assert balance.expert_bias_E.tolist() == [0.5, 1.0, 2.0, 4.0]
    assert balance.counts_E is held and held.tolist() == [0] * 4
    assert all(state[name] is given[name] for name in given)
    assert list(moe.state_dict()) == list(state)


def test_weights_assigned_to_a_layer_on_the_meta_device_leave_nothing_there() -> None:
    moe, other = MoE(CONFIG, device="meta"), MoE(CONFIG, seed=3)
    moe.load_state_dict(other.state_dict(), assign=True)
    x = torch.randn(5, 8)
    assert torch.equal(moe(x, seq_len=5), other(x, seq_len=5))
    assert torch.equal(moe.router.balance.counts_E, other.router.balance.counts_E)


def test_a_bias_made_narrow_by_hand_is_refused() -> None:
    moe = MoE(replace(CONFIG, load_balance_coeff=1e-3))
    moe.router.balance.expert_bias_E = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"expert_bias_E is torch\.bfloat16"):
        update_expert_bias(moe)


def test_the_reference_of_a_bfloat16_layer_has_a_wide_bias() -> None:
    case = Case(Parallel(), dtype=torch.bfloat16, favoured=(0, 3))
    assert build(case).state_dict()["router.balance.expert_bias_E"].dtype == torch.float32
    assert on_one_device(case).y.dtype == torch.bfloat16
