"""The same calls. In local mode the product is Varying until the all-reduce says that it
is a summand."""

import spmd_types as spmd
import torch
from torch import Tensor


def program(rows: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    spmd.assert_type(rows, {"etp": spmd.I})
    spmd.assert_type(w1, {"etp": spmd.S(2)})
    spmd.assert_type(w2, {"etp": spmd.S(1)})
    spmd.assert_type(bias, {"etp": spmd.I})
    x = spmd.convert(rows, "etp", src=spmd.I, dst=spmd.R)
    y = torch.bmm(torch.bmm(x, w1).square(), w2)
    return spmd.all_reduce(y, "etp", src=spmd.P, dst=spmd.I) + bias
