"""Each rank divides its loss by its own number of tokens, and FSDP2 averages. For the
experts it would average over `edp` alone, so they get the divisor of all data ranks."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from placements.testing import device_mesh


class Experts(nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.detach())

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        ep = device_mesh()["ep"]
        mine = gathered(gates, ep).chunk(ep.size(), 1)[ep.get_local_rank()]
        y = torch.einsum("tg,td,gdf->tf", mine, gathered(x, ep), self.w)
        summands = DTensor.from_local(y, ep, [Partial()])
        return summands.redistribute(placements=[Shard(0)]).to_local()


def gathered(x: Tensor, ep: DeviceMesh) -> Tensor:
    whole = DTensor.from_local(x, ep, [Shard(0)]).redistribute(placements=[Replicate()])
    return whole.to_local(grad_placements=[Partial()])


def trained(experts: Experts, x: Tensor, gates: Tensor) -> Tensor | None:
    experts(x.detach(), gates.detach()).square().sum(1).mean().backward()
    return experts.w.grad


def program(x: Tensor, gates: Tensor, w: Tensor) -> Tensor | None:
    experts = fully_shard(Experts(w), mesh=device_mesh()["edp"])
    experts.set_gradient_divide_factor(device_mesh().size())
    return trained(experts, x, gates)
