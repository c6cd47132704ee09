"""Two all-reduces and a division."""

import spmd_types as spmd
from torch import Tensor


def program(x: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    spmd.assert_type(x, {"dp": spmd.S(0)})
    spmd.assert_type(w, {"dp": spmd.I})
    spmd.assert_type(valid, {"dp": spmd.S(0)})
    rows = x @ spmd.convert(w, "dp", src=spmd.I, dst=spmd.R)
    losses = rows.square().squeeze(1) * valid
    total = spmd.all_reduce(losses.sum(), "dp", src=spmd.P, dst=spmd.I)
    return total / spmd.all_reduce(valid.sum(), "dp", src=spmd.P, dst=spmd.I)
