"""The counts are summed over `dp` alone. The backend on DTensor had got the sum over `tp`
for free from a Partial placement, and the new one lost it: from the second step on each
`tp` rank chooses by another bias (B31: torchtitan #4154). Where counts are Partial, the
sign of their distance from the mean is refused, since it is not linear."""

import spmd_types as spmd
import torch.distributed as dist
from torch import Tensor

from examples.migrate.counts_and_bias.after_spmd_types import declare
from examples.migrate.counts_and_bias.one_device import counted, updated
from placements import P, R, all_reduce
from placements.testing import device_mesh


def before(scores: Tensor, bias: Tensor) -> Tensor:
    counts = counted(scores, bias)
    dist.all_reduce(counts, group=device_mesh().get_group("dp"))
    return updated(bias, counts)


def after_placements(scores: Tensor, bias: Tensor) -> Tensor:
    counts = all_reduce(counted(scores, bias), "dp", src=P, dst=R)
    return updated(bias, counts)


def after_spmd_types(scores: Tensor, bias: Tensor) -> Tensor:
    declare(scores, bias)
    counts = spmd.all_reduce(counted(scores, bias), "dp", src=spmd.P, dst=spmd.R)
    return updated(bias, counts)
