"""Each rank divides by its own number of valid tokens, and the means are averaged: tokens
of a rank with few valid ones count more (B67: torchtitan #1842, mended in #2206). The
gradient is right for that other loss, so `check_adjoint` has nothing to say, and the
comparison with one device has."""

import spmd_types as spmd
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from placements import I, P, R, all_reduce, convert
from placements.testing import device_mesh


def before(x: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    w_whole = DTensor.from_local(w, device_mesh(), [Replicate()])
    used = w_whole.to_local(grad_placements=[Partial()])
    mean = ((x @ used).square().squeeze(1) * valid).sum() / valid.sum()
    means = DTensor.from_local(mean, device_mesh(), [Partial()])
    return means.redistribute(placements=[Replicate()]).to_local() / 2


def after_placements(x: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    losses = (x @ convert(w, "dp", src=I, dst=R)).square().squeeze(1) * valid
    return all_reduce(losses.sum() / valid.sum(), "dp", src=P, dst=I) / 2


def after_spmd_types(x: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    spmd.assert_type(x, {"dp": spmd.S(0)})
    spmd.assert_type(w, {"dp": spmd.I})
    spmd.assert_type(valid, {"dp": spmd.S(0)})
    rows = x @ spmd.convert(w, "dp", src=spmd.I, dst=spmd.R)
    mean = (rows.square().squeeze(1) * valid).sum() / valid.sum()
    return spmd.all_reduce(mean, "dp", src=spmd.P, dst=spmd.I) / 2
