"""The number of ranks is read from the mesh of a DTensor, and the weight is a plain tensor
by now: it is taken for 1, and each rank adds the whole bias (B19: torchtitan #4245). That
happened in code that was typed already, because the sum is made where everything is
Varying. Here, and in their global mode, the product is Partial at once."""

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from examples.migrate.expert_tensor_parallel.before import (
    experts,
    summed,
    used_differently,
)
from placements import I, P, R, all_reduce, convert


def degree(w: Tensor) -> int:
    return w.device_mesh["etp"].size() if isinstance(w, DTensor) else 1


def before(rows: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    x = used_differently(rows)
    return summed(experts(x, w1, w2, used_differently(bias), degree(w1)))


def after_placements(rows: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    x = convert(rows, "etp", src=I, dst=R)
    y = torch.bmm(torch.bmm(x, w1).square(), w2)
    y = y + convert(bias, "etp", src=I, dst=R) / degree(w1)
    return all_reduce(y, "etp", src=P, dst=I)


def after_spmd_types(rows: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    spmd.assert_type(rows, {"etp": spmd.I})
    spmd.assert_type(w1, {"etp": spmd.S(2)})
    spmd.assert_type(w2, {"etp": spmd.S(1)})
    spmd.assert_type(bias, {"etp": spmd.I})
    x = spmd.convert(rows, "etp", src=spmd.I, dst=spmd.R)
    y = torch.bmm(torch.bmm(x, w1).square(), w2)
    y = y + spmd.convert(bias, "etp", src=spmd.I, dst=spmd.R) / degree(w1)
    return spmd.all_reduce(y, "etp", src=spmd.P, dst=spmd.I)
