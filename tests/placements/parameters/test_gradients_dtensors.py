"""Gradients beside FSDP2 and DTensor."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as DPartial
from torch.distributed.tensor import Replicate as DReplicate
from torch.distributed.tensor import Shard as DShard

from placements import (
    PlacementError,
    R,
    clip_grad_norm_,
    declare,
    gradient_axes,
    reduce_gradients,
    set_current_mesh,
)
from placements.testing import device_mesh, run_ranks
from tests.support.one_parameter import One


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
