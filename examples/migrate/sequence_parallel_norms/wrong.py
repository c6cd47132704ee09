"""Nobody sums the gradient of the norm. In Megatron-LM a later pass does so for parameters
with the flag `sequence_parallel`, and the last norm lacked it (#1446, of the kind of B06);
in DTensor a fused norm gets plain tensors, and a bare `to_local()` says that the gradient
is complete. Forward and loss look right. In types the weight is Invariant and the tokens
are cut, and these do not mix."""

import spmd_types as spmd
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from examples.migrate.sequence_parallel_norms.one_device import rms_norm
from placements import R, S, all_gather
from placements.testing import device_mesh


def before(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    mesh = device_mesh()
    norm_whole = DTensor.from_local(norm, mesh, [Replicate()])
    w_cut = DTensor.from_local(w, mesh, [Shard(1)])
    rows = DTensor.from_local(rms_norm(x, norm_whole.to_local()), mesh, [Shard(0)])
    return (rows.redistribute(placements=[Replicate()]) @ w_cut).to_local()


def after_placements(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    return all_gather(rms_norm(x, norm), "tp", src=S(0), dst=R) @ w


def after_spmd_types(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.S(0)})
    spmd.assert_type(norm, {"tp": spmd.I})
    spmd.assert_type(w, {"tp": spmd.S(1)})
    return spmd.all_gather(rms_norm(x, norm), "tp", src=spmd.S(0), dst=spmd.R) @ w
