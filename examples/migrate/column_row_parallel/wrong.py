"""The shared output, which is whole, is added to the summands before they are summed: it
counts once per rank (B17: TensorRT-LLM #15922, eight times on eight ranks). Reduce first,
then add."""

import spmd_types as spmd
import torch.distributed as dist
from torch import Tensor

from placements import I, P, R, all_reduce, convert
from placements.testing import device_mesh


def before(x: Tensor, w1: Tensor, w2: Tensor, shared: Tensor) -> Tensor:
    y = (x @ w1).square() @ w2 + x @ shared
    dist.all_reduce(y, group=device_mesh().get_group("tp"))
    return y


def after_placements(x: Tensor, w1: Tensor, w2: Tensor, shared: Tensor) -> Tensor:
    rows = convert(x, "tp", src=I, dst=R)
    whole = rows @ convert(shared, "tp", src=I, dst=R)
    return all_reduce((rows @ w1).square() @ w2 + whole, "tp", src=P, dst=I)


def after_spmd_types(x: Tensor, w1: Tensor, w2: Tensor, shared: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.I})
    spmd.assert_type(w1, {"tp": spmd.S(1)})
    spmd.assert_type(w2, {"tp": spmd.S(0)})
    spmd.assert_type(shared, {"tp": spmd.I})
    rows = spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
    whole = rows @ spmd.convert(shared, "tp", src=spmd.I, dst=spmd.R)
    y = (rows @ w1).square() @ w2 + whole
    return spmd.all_reduce(y, "tp", src=spmd.P, dst=spmd.I)
