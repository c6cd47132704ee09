"""FSDP2 and DDP around typed modules: right wraps are accepted, wrong ones are refused."""

from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import placements
from placements import (
    I,
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    clip_grad_norm_,
    declare,
    reduce_gradients,
    reinterpret,
    set_current_mesh,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, Parallel
from tests.support.moe import CONFIG, meshes
from tests.support.sharded import by_hand

CHECKED = pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])


class Weighted(nn.Module):
    def __init__(self, types: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        declare(self, {"w": types})

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def summed(module: Any) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def step(module: Any, checked: bool, scale: float = 1.0) -> None:
    """One forward and backward; every axis is one of data."""
    x = torch.full((4, 2), scale, dtype=torch.float64)
    mesh = device_mesh()
    with typecheck() if checked else nullcontext():
        assert_type(x, dict.fromkeys(mesh.mesh_dim_names or (), V))
        loss = module(x)
        for axis in mesh.mesh_dim_names or () if checked else ():
            if (placements.type_of(loss) or {}).get(axis) == V:
                loss = reinterpret(loss, axis, src=V, dst=P)
        loss.backward()


def error_of(call: Any, *args: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        call(*args)
    return str(caught.value)


def other_mesh(ranks: Any) -> DeviceMesh:
    """A mesh that has not been told of: no names, made by hand."""
    return DeviceMesh("cpu", torch.tensor(ranks))


def of_the_layer(parallel: Parallel, checked: bool, whole: bool) -> str:
    with meshes(parallel) as (dense, sparse):
        moe: Any = MoE(CONFIG, parallel, sparse_mesh=sparse)
        fully_shard(moe if whole else moe.experts, mesh=dense["dp"])
        summed(moe if whole else moe.experts)
        x = torch.randn(1, 4, 8)
        with typecheck() if checked else nullcontext():
            assert_type(x, moe.input_types(4))
            return error_of(lambda: moe(x, seq_len=4))


@CHECKED
@pytest.mark.parametrize("backend", ["sim", "gloo"])
@pytest.mark.parametrize("whole", [True, False])
def test_experts_that_are_cut_over_ep_are_not_sharded_over_it(
    whole: bool, backend: Any, checked: bool
) -> None:
    for parallel in (Parallel(dp=4, ep=2), Parallel(dp=4, ep=4)):
        args = parallel, checked, whole
        for text in run_ranks(parallel.dense_mesh(), of_the_layer, *args, backend=backend):
            name = "experts.w1_GFD" if whole else "w1_GFD"
            assert (
                f"{name!r} is wrapped over the ranks of axis 'ep', on which it is S(0)"
                in text
            )
            assert "hold different pieces" in text
            assert "placements.fully_shard(module, meshes=...)" in text


# The mesh, the declared type, the ranks that FSDP2 is given, what is wrong.
WRONG: list[tuple[dict[str, int], Any, Any, str]] = [
    ({"dp": 2, "tp": 2}, {"dp": R, "tp": S(0)}, [0, 1, 2, 3], "of axis 'tp', on which it is S(0)"),
    ({"dp": 2, "tp": 2}, {"dp": R, "tp": S(1)}, [[0, 1], [2, 3]], "of axis 'tp', on which"),
    ({"dp": 4}, {"dp": I}, [0, 1, 2, 3], "counts it once for every rank"),
    ({"dp": 4}, {"dp": V}, [0, 1, 2, 3], "parameters of their own"),
]  # fmt: skip


def over_ranks(types: Any, ranks: Any, checked: bool) -> str:
    with set_current_mesh(device_mesh()):
        module = Weighted(types)
        fully_shard(module, mesh=named(other_mesh(ranks)))
        summed(module)
        return error_of(step, module, checked)


def named(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim == 1:
        return mesh
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("outer", "inner"))


@CHECKED
@pytest.mark.parametrize(("mesh", "types", "ranks", "message"), WRONG, ids=str)
def test_only_ranks_with_equal_parameters_share_them(
    mesh: dict[str, int], types: Any, ranks: Any, message: str, checked: bool
) -> None:
    for text in run_ranks(mesh, over_ranks, types, ranks, checked):
        assert message in text


def over_half() -> str:
    """FSDP2 over pairs of ranks, which no axis of the mesh has."""
    pairs = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("a", "b"))
    with set_current_mesh(device_mesh()):
        module = Weighted({"dp": R})
        fully_shard(module, mesh=pairs["b"])
        summed(module)
        return error_of(step, module, False)


def test_ranks_that_no_axes_have() -> None:
    for rank, text in enumerate(run_ranks({"dp": 4}, over_half)):
        there = [0, 1] if rank < 2 else [2, 3]
        assert (
            f"over the ranks {there}, which are not those of any axes of Mesh(dp=4)" in text
        )


def averaged(checked: bool, factor: float | None) -> str:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module: Any = Weighted({"dp": R})
        fully_shard(module, mesh=mesh["dp"])
        if factor is not None:
            module.set_gradient_divide_factor(factor)
        return error_of(step, module, checked)


@CHECKED
@pytest.mark.parametrize("factor", [None, 2.0])
@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_averages_are_refused_with_the_calls_that_sum(
    backend: Any, factor: float | None, checked: bool
) -> None:
    for text in run_ranks({"dp": 4}, averaged, checked, factor, backend=backend):
        assert (
            f"the gradient of 'w' is to be divided by {factor or 4:g}, expected a sum"
            in text
        )
        assert "set_gradient_divide_factor(1.0)" in text
        assert "set_force_sum_reduction_for_comms(True)" in text


def averaged_later(checked: bool) -> str:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module: Any = Weighted({"dp": R})
        fully_shard(module, mesh=mesh["dp"])
        summed(module)
        step(module, checked)
        module.set_gradient_divide_factor(2.0)
        return error_of(step, module, checked)


@CHECKED
def test_an_average_that_begins_later_is_refused_in_backward(checked: bool) -> None:
    for text in run_ranks({"dp": 2}, averaged_later, checked):
        assert "is to be divided by 2" in text


def right_by_hand(ranks: Any, checked: bool) -> Any:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module = Weighted(dict.fromkeys(mesh.mesh_dim_names or (), R))
        if dist.get_rank() in other_mesh(ranks).mesh:
            fully_shard(module, mesh=named(other_mesh(ranks)))
            summed(module)
        step(module, checked, 10.0 ** dist.get_rank())
        reduce_gradients(module)
        norm = clip_grad_norm_(module, 1e9).item()
    return cast(DTensor, module.w.grad).full_tensor().unique().tolist(), norm


@CHECKED
@pytest.mark.parametrize(
    "ranks", [[0, 1, 2, 3], [[0, 1], [2, 3]], [[0, 2], [1, 3]]], ids=str
)
@pytest.mark.parametrize(
    "mesh", [{"dp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}], ids=str
)
def test_a_right_wrap_by_hand_is_accepted_whatever_its_mesh_is_called(
    mesh: dict[str, int], ranks: Any, checked: bool
) -> None:
    """Nothing is summed twice, though no name of an axis is known."""
    wanted = [1111.0], pytest.approx(1111 * 8**0.5)
    assert run_ranks(mesh, right_by_hand, ranks, checked) == [wanted] * 4


def two_sparse_meshes() -> None:
    """Two layers whose experts live on different meshes, wrapped part by part."""
    for ep in (2, 4):
        parallel = Parallel(dp=4, ep=ep)
        with meshes(parallel) as (_, sparse):
            moes = [MoE(CONFIG, parallel, sparse_mesh=sparse) for _ in range(2)]
            device_mesh({"edp": 4, "ep": 1, "etp": 1})
            for moe in moes:
                by_hand(moe)
                moe(torch.randn(1, 4, 8), seq_len=4).sum().backward()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
def test_each_module_is_held_to_its_own_mesh() -> None:
    run_ranks(4, two_sparse_meshes)


def ddp_over_ep(parallel: Parallel) -> str:
    with meshes(parallel) as (_, sparse):
        moe = MoE(CONFIG, parallel, sparse_mesh=sparse)
        before = moe.experts.w1_GFD.detach().clone()
        text = error_of(DistributedDataParallel, moe)
        assert torch.equal(moe.experts.w1_GFD, before)
        return text


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_ddp_does_not_overwrite_experts(backend: Any) -> None:
    parallel = Parallel(dp=2, ep=2)
    for text in run_ranks(2, ddp_over_ep, parallel, backend=backend):
        assert "DDP: 'experts.w1_GFD' is wrapped over the ranks of axis 'ep'" in text


def summing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    done: Any = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def ddp(hook: Any, checked: bool = False) -> Any:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module = Weighted({"dp": R})
        wrapped = DistributedDataParallel(module)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        if hook is not summing:
            return error_of(step, wrapped, checked)
        step(wrapped, checked, 10.0 ** dist.get_rank())
        reduce_gradients(module)
        norm = clip_grad_norm_(module, 1e9).item()
    assert module.w.grad is not None
    return module.w.grad.unique().tolist(), norm


@CHECKED
@pytest.mark.parametrize("hook", [None, allreduce_hook])
def test_ddp_that_averages_is_refused(hook: Any, checked: bool) -> None:
    for text in run_ranks({"dp": 2}, ddp, hook, checked, backend="gloo"):
        assert "DDP: the gradient of 'w' is to be divided by 2, expected a sum" in text
        assert "register_comm_hook" in text


def test_ddp_that_sums_is_accepted_and_not_summed_again() -> None:
    """Inside a block the hook's collective is refused, as every raw one is."""
    found = run_ranks({"dp": 2}, ddp, summing, backend="gloo")
    assert found == [([11.0], pytest.approx(11 * 8**0.5))] * 2


class FirstFsdp(FullyShardedDataParallel):
    """What its constructor does to a module; the rest of it needs an accelerator."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._fsdp_wrapped_module = module


def first_fsdp() -> str:
    with set_current_mesh(device_mesh()):
        return error_of(FirstFsdp, Weighted({"dp": R}))


def test_the_first_fsdp_is_refused() -> None:
    for text in run_ranks({"dp": 2}, first_fsdp):
        assert "FullyShardedDataParallel: 'w' has a declared type" in text


def untyped() -> Any:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        plain = DistributedDataParallel(nn.Linear(2, 2, bias=False))
        plain(torch.ones(1, 2)).sum().backward()
        other = nn.Linear(2, 2, bias=False)
        fully_shard(other, mesh=mesh)
        other.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
        other(torch.ones(1, 2)).sum().backward()
    return cast(Any, plain.module.weight.grad).tolist()


def test_modules_without_types_are_left_alone() -> None:
    assert run_ranks({"dp": 2}, untyped, backend="gloo") == [[[1.0, 1.0]] * 2] * 2


def one_rank() -> None:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module = Weighted({"dp": R})
        fully_shard(module, mesh=mesh["dp"])
        step(module, True)
        DistributedDataParallel(Weighted({"dp": R}))(torch.ones(4, 2).double()).backward()


def test_one_rank_averages_nothing() -> None:
    run_ranks({"dp": 1}, one_rank)
