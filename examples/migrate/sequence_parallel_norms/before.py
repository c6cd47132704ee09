"""What `SequenceParallel` and `ColwiseParallel` of DTensor do. The product of a cut `x` and
a whole weight gives the weight a Partial gradient, which `from_local` sums in backward."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from examples.migrate.sequence_parallel_norms.one_device import rms_norm
from placements.testing import device_mesh


def program(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    mesh = device_mesh()
    x_cut = DTensor.from_local(x, mesh, [Shard(0)])
    norm_whole = DTensor.from_local(norm, mesh, [Replicate()])
    w_cut = DTensor.from_local(w, mesh, [Shard(1)])
    rows = rms_norm(x_cut, norm_whole).redistribute(placements=[Replicate()])
    return (rows @ w_cut).to_local()
