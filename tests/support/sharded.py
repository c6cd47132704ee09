"""Training steps of the layer, sharded by FSDP2 in one way or another."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

import placements
from placements import (
    Mesh,
    assert_type,
    clip_grad_norm_,
    join,
    reduce_gradients,
    split,
    typecheck,
)
from placements.types.axis import print_types
from placements.types.text import parse_types
from spmd_moe import MoE, Parallel
from tests.support.moe import Case, build, declared_types, meshes


def in_one_call(moe: MoE, **options: Any) -> None:
    placements.fully_shard(moe, meshes=moe.meshes, **options)


def in_two_phases(moe: MoE, **options: Any) -> None:
    """As with a torch that has one mesh for each call."""
    with mock.patch("placements.parameters.fsdp.mesh_for_a_parameter", lambda: None):
        placements.fully_shard(moe, meshes=moe.meshes, **options)


def each_part(moe: MoE, **options: Any) -> None:
    for part in (moe.shared_experts, moe.experts, moe.router, moe):
        assert part is not None
        placements.fully_shard(part, meshes=moe.meshes, **options)


def by_hand(moe: MoE, **options: Any) -> None:
    """Torch's own calls, as a trainer may have them: right, and accepted."""
    dense, sparse = moe.meshes[0].device_mesh, moe.meshes[-1].device_mesh
    assert dense is not None and sparse is not None
    parts: list[tuple[Any, Any]] = [(moe, dense["dp"])]
    if moe.parallel.ep > 1:
        parts = [(moe.experts, sparse["edp"]), *parts]
    for module, mesh in parts:
        fsdp.fully_shard(module, mesh=mesh, **options)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def not_at_all(moe: MoE, **options: Any) -> None:
    pass


Wrap = Callable[..., None]


class Run(NamedTuple):
    """What some steps leave behind on a rank, whole but for the cuts of types."""

    y: Tensor
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    types: dict[str, str]
    shards: dict[str, tuple[Any, ...]]


def trained(
    case: Case,
    wrap: Wrap,
    options: dict[str, Any] | None = None,
    steps: int = 3,
    parts: int = 1,
) -> Run:
    """Train some steps of AdamW; each is the sum of `parts` backward passes."""
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        mesh, rank = (dense or Mesh({})), (dist.get_rank() if dense else 0)
        x, weights = (split(t, moe.layout.input, mesh)[rank] for t in case.tensors())
        wrap(moe, **(options or {}))
        optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)
        norms: list[float] = []
        y = x
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(parts):
                if isinstance(moe, fsdp.FSDPModule):
                    moe.set_requires_gradient_sync(part == parts - 1)
                y = one_pass(case, moe, x * (1 + step + part), weights)
            reduce_gradients(moe, meshes=moe.meshes)
            norms.append(clip_grad_norm_(moe, 10.0, meshes=moe.meshes).item())
            optimizer.step()
        named = dict(moe.named_parameters())
        return Run(
            y.detach(), norms,
            {name: _whole(p.grad) for name, p in named.items()},
            {name: _whole(p.detach()) for name, p in named.items()},
            {name: print_types(types) for name, types in declared_types(moe)},
            {name: tuple(getattr(p, "placements", ())) for name, p in named.items()},
        )  # fmt: skip


def one_pass(case: Case, moe: MoE, x: Tensor, weights: Tensor) -> Tensor:
    with typecheck() if case.checked else nullcontext():
        types = moe.input_types(case.seq_len)
        x, weights = x.detach().requires_grad_(), weights.detach()
        assert_type(x, types)
        assert_type(weights, types)
        y = moe(x, seq_len=case.seq_len)
        (y * weights).sum().backward()
    return y


def _whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def assert_trained_alike(
    case: Case, runs: list[Run], steps: int = 3, parts: int = 1
) -> None:
    """Output, norms, gradients and parameters are those of one device."""
    dp = case.parallel.dp
    one = replace(case, parallel=Parallel(), batch=case.batch * dp, checked=False)
    wanted = trained(one, not_at_all, None, steps, parts)
    for run in runs:
        torch.testing.assert_close(run.norms, wanted.norms, rtol=1e-10, atol=0)
    dense, sparse = case.parallel.dense_mesh(), case.parallel.sparse_mesh()
    for field in ("gradients", "parameters"):
        for name, value in getattr(wanted, field).items():
            said = parse_types(runs[0].types[name])
            mesh = dense if "tp" in said else sparse
            found = join([getattr(run, field)[name] for run in runs], said, mesh)
            torch.testing.assert_close(found, value, rtol=1e-8, atol=1e-9, msg=name)
