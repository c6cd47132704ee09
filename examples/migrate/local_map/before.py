"""`in_grad_placements` says that the gradient of the tokens is a summand on each rank. Its
default is the placement of the value."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from examples.migrate.local_map.one_device import experts
from placements.testing import device_mesh


def program(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    mesh = device_mesh()
    x_whole = DTensor.from_local(x, mesh, [Replicate()])
    w1_cut = DTensor.from_local(w1, mesh, [Shard(1)])
    w2_cut = DTensor.from_local(w2, mesh, [Shard(0)])
    run = local_map(
        experts,
        out_placements=[Partial()],
        in_placements=([Replicate()], [Shard(1)], [Shard(0)]),
        in_grad_placements=([Partial()], [Shard(1)], [Shard(0)]),
        device_mesh=mesh,
    )
    return run(x_whole, w1_cut, w2_cut).redistribute(placements=[Replicate()]).to_local()
