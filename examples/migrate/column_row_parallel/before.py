"""DTensor finds the summands by itself, as long as nothing leaves it."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from placements.testing import device_mesh


def program(x: Tensor, w1: Tensor, w2: Tensor, shared: Tensor) -> Tensor:
    mesh = device_mesh()
    x_whole = DTensor.from_local(x, mesh, [Replicate()])
    w1_cut = DTensor.from_local(w1, mesh, [Shard(1)])
    w2_cut = DTensor.from_local(w2, mesh, [Shard(0)])
    shared_whole = DTensor.from_local(shared, mesh, [Replicate()])
    routed = ((x_whole @ w1_cut).square() @ w2_cut).redistribute(placements=[Replicate()])
    return (routed + x_whole @ shared_whole).to_local()
