"""The types end where FSDP2 begins: torch's wrapper as before, whose divisor nobody
checks. What it gathers has no type, so the forward declares it."""

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from examples.migrate.fsdp2_with_ep.one_device import TOKENS
from placements.testing import device_mesh


class Experts(nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.detach())

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        spec = spmd.PartitionSpec("ep", None, None)
        both = {"edp": spmd.R, "ep": spmd.V}
        w = spmd.assert_type(self.w, both, partition_spec=spec)
        rows = spmd.all_gather(x, "ep", src=spmd.S(0), dst=spmd.R)
        everywhere = spmd.all_gather(gates, "ep", src=spmd.S(0), dst=spmd.R)
        mine = spmd.convert(everywhere, "ep", src=spmd.R, dst=spmd.S(1))
        y = torch.einsum("tg,td,gdf->tf", mine, rows, w)
        return spmd.reduce_scatter(y, "ep", src=spmd.P, dst=spmd.S(0))


def trained(experts: Experts, x: Tensor, gates: Tensor) -> Tensor | None:
    for held in (x, gates):
        spec = spmd.PartitionSpec(("edp", "ep"), None)
        both = {"edp": spmd.V, "ep": spmd.V}
        spmd.assert_type(held, both, partition_spec=spec)
    loss = experts(x.detach(), gates.detach()).square().sum() / TOKENS
    for axis in ("edp", "ep"):
        loss = spmd.all_reduce(loss, axis, src=spmd.P, dst=spmd.I)
    loss.backward()
    return experts.w.grad


def program(x: Tensor, gates: Tensor, w: Tensor) -> Tensor | None:
    experts = fully_shard(Experts(w), mesh=device_mesh()["edp"])
    experts.set_gradient_divide_factor(1.0)
    return trained(experts, x, gates)
