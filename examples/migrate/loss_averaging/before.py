"""In DTensor both sums are global by themselves."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from placements.testing import device_mesh


def program(x: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    mesh = device_mesh()
    x_cut = DTensor.from_local(x, mesh, [Shard(0)])
    w_whole = DTensor.from_local(w, mesh, [Replicate()])
    valid_cut = DTensor.from_local(valid, mesh, [Shard(0)])
    losses = (x_cut @ w_whole).square().squeeze(1) * valid_cut
    count = valid_cut.sum().redistribute(placements=[Replicate()])
    return (losses.sum().redistribute(placements=[Replicate()]) / count).to_local()
