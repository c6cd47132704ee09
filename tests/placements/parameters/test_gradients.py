"""Gradients are reduced once, over the axes that their types name, and equal one device."""

from contextlib import nullcontext
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from placements import (
    I,
    On,
    P,
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
from tests.support.one_parameter import One, of_dtypes

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
