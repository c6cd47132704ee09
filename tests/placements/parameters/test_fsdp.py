"""`fully_shard`: which ranks, which dim, which sum; beside `reduce_gradients` and clipping."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import placements
from placements import (
    I,
    PlacementError,
    R,
    S,
    clip_grad_norm_,
    declare,
    reduce_gradients,
    set_current_mesh,
    typecheck,
)
from placements.parameters.fsdp import shard_dim
from placements.testing import device_mesh, run_ranks


class Product(nn.Module):
    """y = w * x for every parameter, of sizes that are not divided evenly."""

    def __init__(self, types: dict[str, Any], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name in types:
            self.register_parameter(name, nn.Parameter(torch.ones(5, 4, dtype=dtype)))
        declare(self, types)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p * x for p in self.parameters()]).sum()


def whole(x: Tensor | None) -> Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor()


@pytest.mark.parametrize(
    ("shape", "shards", "dim"),
    [
        ((8, 4, 4), 8, 0),  # 8 experts on 8 ranks
        ((4, 8, 4), 8, 1),  # 4 experts on 8 ranks
        ((2, 8, 4), 4, 1),  # 4 experts on ep=2, edp=4
        ((4, 8, 4), 4, 0),
        ((2, 6, 4), 4, 0),  # FSDP2 cuts other dims evenly only
        ((2, 0, 4), 4, 0),
        ((2,), 4, 0),
        ((2, 8), 1, 0),
    ],
)
def test_the_dim_that_has_a_row_for_every_rank(
    shape: tuple[int, ...], shards: int, dim: int
) -> None:
    assert shard_dim(shape, shards) == dim


# The mesh, the axes that hold whole copies, and for a type the dims that FSDP2 is given.
MESHES: list[tuple[dict[str, int], Any, dict[str, Any], list[tuple[int, str]]]] = [
    ({"dp": 4}, (), {"dp": R}, [(4, "S")]),
    ({"dp": 2, "tp": 2}, (), {"dp": R, "tp": R}, [(2, "S")]),
    ({"dp": 2, "tp": 2}, (), {"dp": R, "tp": S(1)}, [(2, "S")]),
    (
        {"dp_outer": 2, "dp": 2},
        ("dp_outer",),
        {"dp_outer": R, "dp": R},
        [(2, "R"), (2, "S")],
    ),
    (
        {"dp": 2, "dp_outer": 2},
        ("dp_outer",),
        {"dp_outer": R, "dp": R},
        [(2, "R"), (2, "S")],
    ),
    ({"dp": 4}, {"dp": 2}, {"dp": R}, [(2, "R"), (2, "S")]),
    ({"dp": 4}, ("dp",), {"dp": R}, [(4, "R"), (1, "S")]),
    ({"dp": 2, "cp": 2}, (), {"dp": R, "cp": R}, [(4, "S")]),
    ({"dp": 2, "cp": 2}, (), {"dp": R, "cp": I}, [(2, "S")]),
    ({"dp": 2, "cp": 2}, (), {"dp": I, "cp": I}, [(1, "S")]),
    ({"dp": 2, "cp": 2}, (), {"dp": S(0), "cp": R}, [(2, "S")]),
    ({"tp": 4}, (), {"tp": R}, [(1, "S")]),
]


def sharded(types: dict[str, Any], replicate: Any) -> Any:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module = Product({"w": types})
        placements.fully_shard(module, replicate=replicate)
        weight = cast(DTensor, module.w)
        said = [p.is_shard() for p in weight.placements]
        dims = list(zip(weight.device_mesh.shape, ["RS"[s] for s in said], strict=True))
        module(torch.full((5, 4), 10.0 ** dist.get_rank(), dtype=torch.float64)).backward()
        reduce_gradients(module)
        norm = clip_grad_norm_(module, 1e9)
        if types.get("tp") == R:  # otherwise nothing was left to it
            with pytest.raises(PlacementError, match="was reduced already"):
                reduce_gradients(module)
    return dims, whole(weight.grad).unique().tolist(), norm.item()


def over(dims: list[int], values: Tensor) -> Tensor:
    return values.sum(dims, keepdim=True).expand(values.shape) if dims else values


@pytest.mark.parametrize(("mesh", "replicate", "types", "dims"), MESHES, ids=str)
def test_gradients_are_summed_where_the_type_is_replicate(
    mesh: dict[str, int], replicate: Any, types: dict[str, Any], dims: Any
) -> None:
    """Rank r adds 10**r: digits show whose gradients are in the sum, and how often."""
    found = run_ranks(mesh, sharded, types, replicate)
    grid = torch.arange(4).reshape(tuple(mesh.values()))
    summed = [k for k, axis in enumerate(mesh) if types[axis] == R]
    split = [k for k, axis in enumerate(mesh) if types[axis] == S(1) or types[axis] == S(0)]
    sums = over(summed, 10.0**grid)
    squares = over(split, sums**2 * 20).flatten()  # each of 20 elements once
    for rank, (got, values, norm) in enumerate(found):
        assert got == dims
        assert values == [sums.flatten()[rank].item()]
        assert norm == pytest.approx(squares[rank].item() ** 0.5, rel=1e-12)


def refused(call: Any) -> str:
    mesh = device_mesh()
    with set_current_mesh(mesh), pytest.raises((ValueError, TypeError)) as caught:
        call()
    return str(caught.value)


def undeclared() -> None:
    module = Product({"w": {"dp": R}})
    module.other = nn.Parameter(torch.ones(2))
    placements.fully_shard(module)


def a_scalar() -> None:
    module = Product({"w": {"dp": R}})
    module.w = nn.Parameter(torch.ones(()))
    placements.fully_shard(module)


def sizes_alone() -> None:
    placements.fully_shard(Product({"w": {"dp": R}}), meshes={"dp": 2})


def unknown_axis() -> None:
    placements.fully_shard(Product({"w": {"dp": R}}), replicate=("dp_outer",))


def unknown_shard_axis() -> None:
    placements.fully_shard(Product({"w": {"dp": R}}), shard=("fsdp",))


def odd_copies() -> None:
    placements.fully_shard(Product({"w": {"dp": R}}), replicate={"dp": 3})


def a_string() -> None:
    placements.fully_shard(Product({"w": {"dp": R}}), replicate="dp")


def a_shard_string() -> None:
    placements.fully_shard(Product({"w": {"dp": R}}), shard="dp")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (undeclared, "parameter 'other' has no declared type"),
        (a_scalar, "'w' has no dim along which it could be cut"),
        (sizes_alone, "'w' lives on Mesh(dp=2), which is sizes alone"),
        (unknown_axis, "no mesh has the axis 'dp_outer'; there are ['dp']"),
        (unknown_shard_axis, "no mesh has the axis 'fsdp'; there are ['dp']"),
        (odd_copies, "the 2 ranks of axis 'dp' cannot hold 3 copies"),
        (a_string, "replicate=('dp',), not 'dp'"),
        (a_shard_string, "shard=('dp',), not 'dp'"),
    ],
)
def test_what_cannot_be_sharded_is_named(call: Any, message: str) -> None:
    for text in run_ranks({"dp": 2}, refused, call):
        assert message in text


def mixed_in_one_module() -> str:
    dense, other = device_mesh({"dp": 2, "tp": 2}), device_mesh({"edp": 4})
    with pytest.MonkeyPatch.context() as patch, set_current_mesh(dense):
        patch.setattr("placements.parameters.fsdp.mesh_for_a_parameter", lambda: None)
        a = {"a": {"dp": R, "tp": R}, "b": {"dp": R, "tp": R}}
        inner = Product(a | {"c": {"edp": R}})
        with pytest.raises(ValueError) as caught:
            placements.fully_shard(nn.Sequential(inner), meshes=(dense, other))
    return str(caught.value)


def test_parameters_of_one_module_on_two_meshes_need_a_newer_torch() -> None:
    for text in run_ranks(4, mixed_in_one_module):
        assert "'0' are to be sharded over different ranks" in text


def test_on_one_device_nothing_is_sharded() -> None:
    module = Product({"w": {"dp": R}})
    with set_current_mesh({}):
        assert placements.fully_shard(module) is module
    assert not isinstance(module, FSDPModule)


def in_bfloat16(reduce_dtype: torch.dtype | None, explicit: bool) -> list[float]:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module = Product({"w": {"dp": R, "tp": R}}, torch.float32)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        placements.fully_shard(module, mp_policy=policy)
        # 256 on the first rank of tp, 1 on the second: 257 has no bfloat16.
        module(torch.full((5, 4), (128.0, 0.5)[mesh.get_local_rank("tp")])).backward()
        reduce_gradients(module, op_dtype=torch.float32 if explicit else None)
        assert whole(module.w.grad).dtype == torch.float32
    return whole(module.w.grad).unique().tolist()


def test_the_reduce_dtype_holds_for_all_sums() -> None:
    mesh = {"dp": 2, "tp": 2}
    assert run_ranks(mesh, in_bfloat16, torch.bfloat16, False) == [[256.0]] * 4
    assert run_ranks(mesh, in_bfloat16, torch.bfloat16, True) == [[257.0]] * 4
    assert run_ranks(mesh, in_bfloat16, None, False) == [[257.0]] * 4


def cast_parameters() -> tuple[torch.dtype, torch.dtype, Any]:
    mesh = device_mesh()
    with set_current_mesh(mesh), typecheck():
        module = Product({"w": {"dp": R}}, torch.float32)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        placements.fully_shard(module, mp_policy=policy)
        x = placements.assert_type(torch.ones(5, 4), {"dp": placements.V})
        y = module(x)
        found = placements.type_of(y)
        placements.reinterpret(y, "dp", src=placements.V, dst=placements.P).backward()
    grad = module.w.grad
    assert grad is not None
    return y.dtype, grad.dtype, repr(found)


def test_parameters_are_cast_and_keep_their_types() -> None:
    wanted = torch.bfloat16, torch.float32, "{dp:V}"
    assert run_ranks({"dp": 2}, cast_parameters) == [wanted] * 2


def backward_after_the_sum() -> str:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module = Product({"w": {"dp": R, "tp": R}})
        placements.fully_shard(module)
        x = torch.ones(5, 4, dtype=torch.float64)
        module(x).backward()
        reduce_gradients(module)
        module(x).backward()
        with pytest.raises(PlacementError) as caught:
            clip_grad_norm_(module, 1.0)
        for set_to_none in (True, False):
            module.zero_grad(set_to_none=set_to_none)
            module(x).backward()
            reduce_gradients(module)
            assert whole(module.w.grad).unique().tolist() == [4.0]
    return str(caught.value)


def test_a_backward_after_the_sum_is_found_and_zero_grad_starts_anew() -> None:
    for text in run_ranks({"dp": 2, "tp": 2}, backward_after_the_sum):
        assert "backward added to the gradient of 'w' after it was reduced" in text


class Half(nn.Module):
    """Uses its parameter on some ranks of tp only."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        self.other = nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        declare(self, {"*": {"dp": R, "tp": R}})

    def forward(self, x: Tensor, used: bool) -> Tensor:
        return (x * self.w).sum() + (x * self.other).sum() if used else (x * self.w).sum()


def used_on_one_rank_of_tp() -> list[float]:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module = Half()
        placements.fully_shard(module)
        x = torch.ones(4, 2, dtype=torch.float64)
        module(x, mesh.get_local_rank("tp") == 0).backward()
        reduce_gradients(module)
    return whole(module.other.grad).unique().tolist()


def test_a_rank_without_a_gradient_gets_the_sum() -> None:
    assert run_ranks({"dp": 2, "tp": 2}, used_on_one_rank_of_tp) == [[2.0]] * 4


def frozen() -> Any:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        module = Product({"w": {"dp": R}, "v": {"dp": R}})
        module.v.requires_grad_(False)
        ignored = {"v"} if dist.get_world_size() == 2 else set[str]()
        placements.fully_shard(
            module, ignored_params=[p for n, p in module.named_parameters() if n in ignored]
        )
        module(torch.ones(5, 4, dtype=torch.float64)).backward()
        reduce_gradients(module)
        clip_grad_norm_(module, 1.0)
    return isinstance(module.v, DTensor), module.v.grad


def test_frozen_and_ignored_parameters() -> None:
    assert run_ranks({"dp": 4}, frozen) == [(True, None)] * 4
    assert run_ranks({"dp": 2}, frozen) == [(False, None)] * 2


def groups_made() -> bool:
    dense = device_mesh({"dp": 2, "cp": 2})
    made: list[DeviceMesh] = []
    with set_current_mesh(dense):
        for _ in range(2):
            module = Product({"w": {"dp": R, "cp": R}})
            placements.fully_shard(module)
            made.append(cast(DTensor, module.w).device_mesh)
    return made[0] is made[1]


def test_process_groups_are_made_once_for_a_mesh() -> None:
    assert run_ranks(4, groups_made) == [True] * 4
