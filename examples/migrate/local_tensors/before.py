"""The scores leave DTensor with the placement of their gradient. So do the tokens, for the
same reason: each rank multiplies them by its own columns."""

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from placements.testing import device_mesh


def program(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    mesh = device_mesh()
    x_whole = DTensor.from_local(x, mesh, [Replicate()])
    gate_whole = DTensor.from_local(gate, mesh, [Replicate()])
    w_cut = DTensor.from_local(w, mesh, [Shard(1)])
    scores = (x_whole @ gate_whole).to_local(grad_placements=[Partial()])
    rows = x_whole.to_local(grad_placements=[Partial()])
    return (rows @ w_cut.to_local()) * scores
