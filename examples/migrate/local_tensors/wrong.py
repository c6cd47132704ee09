"""A bare `to_local()` declares that the gradient of the scores is complete on every rank,
which in types is Invariant. But each rank uses the scores with its own columns, so each has
one summand of the gradient, and nobody adds them up. The forward is right, and the router's
weights drift apart after the first step (B01: torchtitan #2387, mended in #2416). The mend
is to name `grad_placements` in DTensor, and `convert` in the others."""

import spmd_types as spmd
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from placements import I, R, convert
from placements.testing import device_mesh


def before(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    mesh = device_mesh()
    x_whole = DTensor.from_local(x, mesh, [Replicate()])
    gate_whole = DTensor.from_local(gate, mesh, [Replicate()])
    w_cut = DTensor.from_local(w, mesh, [Shard(1)])
    scores = (x_whole @ gate_whole).to_local()  # its gradient counts as complete
    rows = x_whole.to_local(grad_placements=[Partial()])
    return (rows @ w_cut.to_local()) * scores


def after_placements(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    scores = x @ gate
    rows = convert(x, "tp", src=I, dst=R)
    return (rows @ w) * scores


def after_spmd_types(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.I})
    spmd.assert_type(gate, {"tp": spmd.I})
    spmd.assert_type(w, {"tp": spmd.S(1)})
    scores = x @ gate
    rows = spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
    return (rows @ w) * scores
