"""Gradients are reduced once, over the axes that their types name, and equal one device."""

from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard
from torch.nn.functional import linear

from placements import (
    I,
    On,
    P,
    PlacementError,
    R,
    S,
    V,
    all_gather,
    all_reduce,
    assert_type,
    clip_grad_norm_,
    convert,
    declare,
    gradient_axes,
    join,
    ledger,
    load_global_state_dict,
    reduce_gradients,
    reduce_scatter,
    set_current_mesh,
    split,
    type_of,
    typecheck,
    typed,
)
from placements.testing import RankFailure, device_mesh, run_ranks

T, D, H = 8, 4, 8
MLP_TYPES = {
    "w_in_HD": {"dp": R, "tp": S(0)},
    "w_out_DH": {"dp": R, "tp": S(1)},
    "bias_D": {"dp": R, "tp": I},
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small integers in float64: sums and products of a few of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


class Mlp(nn.Module):
    """Megatron's MLP; the square is a non-linearity that is exact."""

    def __init__(self, tp: int) -> None:
        super().__init__()
        self.w_in_HD = nn.Parameter(torch.zeros(H // tp, D, dtype=torch.float64))
        self.w_out_DH = nn.Parameter(torch.zeros(D, H // tp, dtype=torch.float64))
        self.bias_D = nn.Parameter(torch.zeros(D, dtype=torch.float64))
        declare(self, MLP_TYPES)

    def forward(self, x_TD: Tensor) -> Tensor:
        x_TD = convert(x_TD, "tp", src=I, dst=R)
        h_TH = linear(x_TD, self.w_in_HD) ** 2
        y_TD = all_reduce(linear(h_TH, self.w_out_DH), "tp", src=P, dst=I)
        return y_TD + self.bias_D


def mlp_values() -> dict[str, Tensor]:
    shapes = {"w_in_HD": (H, D), "w_out_DH": (D, H), "bias_D": (D,)}
    return {name: numbers(*shapes[name], seed=k) for k, name in enumerate(shapes)}


def mlp_gradients(checked: bool, backwards: int = 1) -> dict[str, Tensor]:
    """This rank's reduced gradients of the MLP on its part of the tokens."""
    mesh = device_mesh()
    with set_current_mesh(mesh) as here, typecheck() if checked else nullcontext():
        assert here is not None
        mlp = Mlp(here.sizes["tp"])
        load_global_state_dict(mlp, mlp_values())
        types = {"dp": S(0), "tp": I}
        pieces = split(numbers(T, D, seed=9), types, here)
        x_TD = assert_type(pieces[mesh.get_rank()], types)
        for _ in range(backwards):
            torch.autograd.backward((mlp(x_TD) * 2).sum())
        reduce_gradients(mlp)
    return {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}


def one_device_gradients() -> dict[str, Tensor]:
    w = {name: value.requires_grad_() for name, value in mlp_values().items()}
    y = (
        linear(linear(numbers(T, D, seed=9), w["w_in_HD"]) ** 2, w["w_out_DH"])
        + w["bias_D"]
    )
    torch.autograd.backward((y * 2).sum())
    return {name: value.grad for name, value in w.items() if value.grad is not None}


MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_gradients_equal_one_device(dp: int, tp: int, checked: bool) -> None:
    mesh = {"dp": dp, "tp": tp}
    ranks = run_ranks(mesh, mlp_gradients, checked)
    for name, expected in one_device_gradients().items():
        # A reduced gradient is Replicate where it was Partial: join demands equal values.
        joined = join([rank[name] for rank in ranks], MLP_TYPES[name], mesh)
        torch.testing.assert_close(joined, expected, rtol=0, atol=0)


def test_accumulated_gradients_are_reduced_together() -> None:
    ranks = run_ranks({"dp": 2, "tp": 2}, mlp_gradients, False, 3)
    expected = one_device_gradients()["bias_D"] * 3
    assert all(torch.equal(rank["bias_D"], expected) for rank in ranks)


def test_gradients_equal_one_device_on_gloo() -> None:
    mesh = {"dp": 2, "tp": 2}
    ranks = run_ranks(mesh, mlp_gradients, True, backend="gloo")
    for name, expected in one_device_gradients().items():
        joined = join([rank[name] for rank in ranks], MLP_TYPES[name], mesh)
        torch.testing.assert_close(joined, expected, rtol=0, atol=0)


E, F = 4, 3  # experts, outputs


class Experts(nn.Module):
    def __init__(self, ep: int) -> None:
        super().__init__()
        self.w_EDF = nn.Parameter(torch.zeros(E // ep, D, F, dtype=torch.float64))
        declare(self, {"w_EDF": {"edp": R, "ep": S(0)}})

    def forward(self, x_TD: Tensor, gates_TE: Tensor) -> Tensor:
        """Tokens of all ep ranks to all experts; gates are zero where not routed."""
        x_TD = all_gather(x_TD, "ep", src=S(0), dst=R)
        y_ETF = x_TD @ self.w_EDF
        y_TF = (y_ETF * gates_TE.t().unsqueeze(-1)).sum(0)
        return reduce_scatter(y_TF, "ep", src=P, dst=S(0))


def expert_gradients() -> Tensor:
    mesh = device_mesh()
    with set_current_mesh(mesh) as here, typecheck():
        assert here is not None
        experts = Experts(here.sizes["ep"])
        load_global_state_dict(experts, {"w_EDF": numbers(E, D, F, seed=1)})
        tokens = {"edp": S(0), "ep": S(0)}
        x_TD = assert_type(split(numbers(T, D), tokens, here)[mesh.get_rank()], tokens)
        gates = {"edp": S(0), "ep": S(1)}
        gates_TE = numbers(T, E, seed=2)
        gates_TE = assert_type(split(gates_TE, gates, here)[mesh.get_rank()], gates)
        torch.autograd.backward((experts(x_TD, gates_TE) ** 2).sum())
        reduce_gradients(experts)
    assert experts.w_EDF.grad is not None
    return experts.w_EDF.grad


def test_expert_gradients_do_not_depend_on_the_split_into_dp_and_ep() -> None:
    # B10 to B12: averaging over the expert-data ranks scales with ep.
    w_EDF = numbers(E, D, F, seed=1).requires_grad_()
    y_TF = ((numbers(T, D) @ w_EDF) * numbers(T, E, seed=2).t().unsqueeze(-1)).sum(0)
    torch.autograd.backward((y_TF**2).sum())
    for edp, ep in [(1, 1), (4, 1), (2, 2), (1, 4)]:
        mesh = {"edp": edp, "ep": ep}
        found = join(run_ranks(mesh, expert_gradients), {"edp": R, "ep": S(0)}, mesh)
        torch.testing.assert_close(found, w_EDF.grad, rtol=0, atol=0)


class One(nn.Module):
    def __init__(self, types: Any, size: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        if types is not None:
            declare(self, {"weight": types})


def reduced_by_type(types: Any) -> list[float]:
    mesh = device_mesh()
    one = One(types)
    one.weight.grad = torch.full((2,), 10.0 ** mesh.get_rank(), dtype=torch.float64)
    with set_current_mesh(mesh):
        reduce_gradients(one)
    return one.weight.grad.tolist()


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"dp": R, "tp": R}, [1111, 1111, 1111, 1111]),
        ({"dp": R, "tp": I}, [101, 1010, 101, 1010]),
        ({"dp": I, "tp": R}, [11, 11, 1100, 1100]),
        ({"dp": I, "tp": V}, [1, 10, 100, 1000]),
        ({"dp": P, "tp": S(0)}, [1, 10, 100, 1000]),
    ],
)
def test_only_partial_axes_are_summed(types: Any, expected: list[float]) -> None:
    ranks = run_ranks({"dp": 2, "tp": 2}, reduced_by_type, types)
    assert ranks == [[value, value] for value in expected]


def twice(between: str) -> str:
    mesh = device_mesh()
    one = One({"dp": R})
    with set_current_mesh(mesh):
        torch.autograd.backward(one.weight.sum())
        reduce_gradients(one)
        if between == "backward":
            torch.autograd.backward(one.weight.sum())
        elif between == "scale":
            assert one.weight.grad is not None
            one.weight.grad.mul_(0.5)
        elif between == "zero_grad":
            one.zero_grad()
            torch.autograd.backward(one.weight.sum())
        try:
            reduce_gradients(one)
        except PlacementError as error:
            assert error.name == "weight"
            return f"{error.expected}, got {error.actual}"
    assert one.weight.grad is not None
    assert one.weight.grad.tolist() == [2, 2]
    return "reduced"


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("nothing", "Partial, got Replicate"),
        ("scale", "Partial, got Replicate"),
        ("backward", "Partial, got Replicate plus Partial"),
        ("zero_grad", "reduced"),
    ],
)
def test_a_gradient_is_reduced_only_once(between: str, expected: str) -> None:
    assert run_ranks({"dp": 2}, twice, between) == [expected] * 2


def type_after_reduction() -> tuple[Any, Any]:
    one = One({"dp": R})
    with set_current_mesh(device_mesh()), typecheck():
        one.weight.grad = torch.ones(2, dtype=torch.float64)
        weight = assert_type(one.weight, {"dp": R})
        assert weight.grad is not None
        reduce_gradients(one)
        return dict(type_of(weight.grad) or {}), weight.grad.tolist()


def test_a_reduced_gradient_is_replicate() -> None:
    assert run_ranks({"dp": 2}, type_after_reduction) == [({"dp": R}, [2, 2])] * 2


def missing_on(ranks: list[int]) -> list[float] | None:
    mesh = device_mesh()
    one = One({"dp": R})
    with set_current_mesh(mesh):
        if mesh.get_rank() not in ranks:
            torch.autograd.backward(one.weight.sum())
        reduce_gradients(one)
    return None if one.weight.grad is None else one.weight.grad.tolist()


def test_a_rank_without_a_gradient_takes_part_with_zeros() -> None:
    assert run_ranks({"dp": 3}, missing_on, [1]) == [[2, 2]] * 3
    assert run_ranks({"dp": 3}, missing_on, [0, 1, 2]) == [None] * 3


def two_meshes() -> tuple[list[float], list[float], dict[str, tuple[str, ...]]]:
    dense, sparse = device_mesh(), device_mesh({"edp": 2, "ep": 2})
    model = nn.ModuleDict(
        {"router": One({"dp": R, "tp": I}), "experts": One({"edp": R, "ep": S(0)})}
    )
    for parameter in model.parameters():
        parameter.grad = torch.full((2,), 10.0 ** dense.get_rank(), dtype=torch.float64)
    with set_current_mesh(dense):
        axes = gradient_axes(model, meshes=(dense, sparse))
        reduce_gradients(model, meshes=(dense, sparse))
    first, second = (p.grad.tolist() for p in model.parameters() if p.grad is not None)
    return first, second, axes


def test_parameters_may_live_on_several_meshes_over_the_same_ranks() -> None:
    ranks = run_ranks({"dp": 1, "tp": 4}, two_meshes)
    assert [router for router, _, _ in ranks] == [
        [1, 1],
        [10, 10],
        [100, 100],
        [1000, 1000],
    ]
    assert [experts for _, experts, _ in ranks] == [[101] * 2, [1010] * 2] * 2
    assert ranks[0][2] == {"router.weight": (), "experts.weight": ("edp",)}


def sent() -> list[tuple[str, str, int]]:
    model = nn.Sequential(One({"dp": R}), One({"dp": R}), One({"dp": I}))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with set_current_mesh(device_mesh()), ledger() as record:
        reduce_gradients(model)
    return [(entry.kind, entry.axis, entry.nbytes) for entry in record.entries]


def test_gradients_travel_together_and_are_recorded() -> None:
    # Two gradients of two numbers, and one number for each: on how many ranks it is.
    assert run_ranks({"dp": 2}, sent) == [[("all-reduce", "dp", 6 * 8)]] * 2


def reduce_undeclared() -> None:
    with set_current_mesh(device_mesh()):
        reduce_gradients(nn.Sequential(One(None)))


def test_a_parameter_without_a_type_is_refused_by_name() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks({"dp": 2}, reduce_undeclared)
    assert isinstance(caught.value.cause, PlacementError)
    assert caught.value.cause.name == "0.weight"
    run_ranks({"dp": 1}, reduce_undeclared)
    reduce_gradients(One(None))


def reduce_without_mesh() -> None:
    reduce_gradients(One({"dp": R}))


def test_several_ranks_without_a_mesh_are_refused() -> None:
    with pytest.raises(RankFailure, match="no mesh is current"):
        run_ranks({"dp": 2}, reduce_without_mesh)


def test_a_parameter_on_another_mesh_is_refused_by_name() -> None:
    with (
        set_current_mesh({"dp": 2}),
        pytest.raises(ValueError, match=r"'weight' .* meshes=\(dense, sparse\)"),
    ):
        reduce_gradients(One({"ep": S(0)}))


def test_a_tied_parameter_is_reduced_once() -> None:
    first, second = One({"dp": R}), One({"dp": R})
    second.weight = first.weight
    model = nn.Sequential(first, second)
    with set_current_mesh({"dp": 2}):
        assert gradient_axes(model) == {"0.weight": ("dp",)}
        declare(second, {"weight": {"dp": I}})
        with pytest.raises(ValueError, match="one tensor"):
            gradient_axes(model)


@typed
class WithAnnotation(nn.Module):
    weight: Annotated[Tensor, On(dp=R, tp=S(0))]

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))


def test_types_are_read_from_the_annotations_of_a_typed_module() -> None:
    with set_current_mesh({"dp": 2, "tp": 2}):
        assert gradient_axes(WithAnnotation()) == {"weight": ("dp",)}


def fsdp_gradients() -> tuple[list[float], list[float]]:
    mesh = device_mesh()
    values = []
    for sharded in (True, False):
        linear_ = nn.Linear(2, 2, bias=False).double()
        nn.init.ones_(linear_.weight)
        declare(linear_, {"weight": {"dp": R, "tp": R}})
        with set_current_mesh(mesh):
            if sharded:
                dp_axes = [a for a in gradient_axes(linear_)["weight"] if a == "dp"]
                fully_shard(linear_, mesh=mesh[tuple(dp_axes)])
                linear_.set_gradient_divide_factor(1.0)  # type: ignore[attr-defined]
            x = torch.full((1, 2), 10.0 ** mesh.get_rank(), dtype=torch.float64)
            torch.autograd.backward(linear_(x).sum())
            reduce_gradients(linear_)
        grad: Any = linear_.weight.grad
        values.append((grad.full_tensor() if sharded else grad).flatten().tolist())
    return values[0], values[1]


def test_axes_that_fsdp2_reduces_are_left_to_it() -> None:
    # FSDP2 sums over dp as it is told to; what is left, tp, is reduced here.
    for fsdp, ours in run_ranks({"dp": 2, "tp": 2}, fsdp_gradients):
        assert fsdp == ours == [1111.0] * 4


def of_dtypes(*dtypes: torch.dtype) -> nn.Module:
    """A Replicate parameter of each dtype, with the gradient 10**rank."""
    module, rank = nn.Module(), torch.distributed.get_rank()
    for k, dtype in enumerate(dtypes):
        p = nn.Parameter(torch.zeros(2, dtype=dtype))
        p.grad = torch.full((2,), 10.0**rank, dtype=dtype)
        module.register_parameter(f"w{k}", p)
    declare(module, {f"w{k}": {"dp": R} for k in range(len(dtypes))})
    return module


def reduced_after_an_error() -> list[Any]:
    module = of_dtypes(torch.float32, torch.complex64)
    with set_current_mesh(device_mesh()):
        with pytest.raises(ValueError, match=r"float32 cannot hold what torch.complex64"):
            reduce_gradients(module, op_dtype=torch.float32)
        reduce_gradients(module)
    return [p.grad[0].item() for p in module.parameters() if p.grad is not None]


def test_what_is_refused_is_refused_before_the_first_sum() -> None:
    assert run_ranks({"dp": 2}, reduced_after_an_error) == [[11, 11]] * 2


def of_a_sharded_dtensor() -> Any:
    """FSDP2 over dp; tp is left to reduce_gradients."""
    mesh, module = device_mesh(), One({"dp": R, "tp": R})
    whole = torch.ones(1, dtype=torch.float64)
    module.weight = nn.Parameter(
        DTensor.from_local(whole, mesh["dp"], [DShard(0)], run_check=False)
    )
    with set_current_mesh(mesh):
        w = cast(Any, module.weight).redistribute(mesh["dp"], [DReplicate()])
        local = w.to_local(grad_placements=[DPartial()])
        (local * 10.0 ** torch.distributed.get_rank()).sum().backward()
        reduce_gradients(module)
        norm = clip_grad_norm_(module, 1e9)
        with pytest.raises(PlacementError, match="was reduced already"):
            reduce_gradients(module)
    return cast(Any, module.weight.grad).to_local().tolist(), norm.item()


def test_an_axis_that_fsdp2_leaves_is_reduced_and_clipped() -> None:
    ranks = run_ranks({"dp": 2, "tp": 2}, of_a_sharded_dtensor)
    assert ranks == [([1111.0], pytest.approx(1111 * 2**0.5))] * 4


def of_a_partial_dtensor(call: Any) -> Any:
    mesh, module = device_mesh(), One({"dp": R})
    local = torch.ones(2, dtype=torch.float64)
    module.weight = nn.Parameter(
        DTensor.from_local(local, mesh, [DReplicate()], run_check=False)
    )
    module.weight.grad = DTensor.from_local(local, mesh, [DPartial()], run_check=False)
    with set_current_mesh(mesh):
        with pytest.raises(PlacementError, match="a DTensor that is Partial on axis 'dp'"):
            call(module)
        p: Any = module.weight
        p.grad = p.grad.redistribute(placements=p.placements)
        call(module)
    return p.grad.to_local().tolist()


def test_a_sum_that_dtensor_has_put_off_is_named() -> None:
    assert run_ranks({"dp": 2}, of_a_partial_dtensor, reduce_gradients) == [[2, 2]] * 2
    clip = partial(clip_grad_norm_, max_norm=1e9)
    assert run_ranks({"dp": 2}, of_a_partial_dtensor, clip) == [[2, 2]] * 2


def missing_on_one_rank(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> Any:
    module = of_dtypes(dtype)
    (p,) = module.parameters()
    p.grad = None
    p.grad_dtype = grad_dtype
    if torch.distributed.get_rank() == 0:
        p.grad = torch.full((2,), 1 + 2**-10, dtype=grad_dtype or torch.float32)
    with set_current_mesh(device_mesh()):
        reduce_gradients(module)
    assert p.grad is not None
    return p.grad.dtype, p.grad[0].item()


def test_a_gradient_that_one_rank_lacks() -> None:
    fine = 1 + 2**-10
    found = run_ranks({"dp": 2}, missing_on_one_rank, torch.complex64, torch.complex64)
    assert found == [(torch.complex64, fine)] * 2
    found = run_ranks({"dp": 2}, missing_on_one_rank, torch.bfloat16, None)
    assert found == [(torch.float32, fine)] * 2


def of_unusual_memory(kind: str) -> Any:
    module = of_dtypes(torch.float64)
    (p,) = module.parameters()
    one = torch.ones(1, dtype=torch.float64)
    p.grad = one.expand(2) if kind == "expanded" else torch.ones_like(p).to_sparse()
    with set_current_mesh(device_mesh()):
        reduce_gradients(module)
        clip_grad_norm_(module, 1e9)
    return p.grad.tolist()


def test_gradients_of_unusual_memory() -> None:
    assert run_ranks({"dp": 2}, of_unusual_memory, "expanded") == [[2, 2]] * 2
    with pytest.raises(RankFailure, match=r"layout torch.sparse_coo, expected a dense"):
        run_ranks({"dp": 2}, of_unusual_memory, "sparse")


def frozen(call: Any, reduced: bool) -> None:
    module = of_dtypes(torch.float64)
    with set_current_mesh(device_mesh()):
        if reduced:
            reduce_gradients(module)
        module.requires_grad_(False)
        call(module)


@pytest.mark.parametrize("call", [reduce_gradients, partial(clip_grad_norm_, max_norm=1.0)])
def test_a_frozen_parameter_with_a_gradient_is_named(call: Any) -> None:
    run_ranks({"dp": 2}, frozen, call, True)
    with pytest.raises(RankFailure, match=r"'w0', which is not trained is Partial"):
        run_ranks({"dp": 2}, frozen, call, False)
