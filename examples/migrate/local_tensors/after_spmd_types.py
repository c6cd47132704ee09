"""The same calls, with declarations in the body in place of a signature."""

import spmd_types as spmd
from torch import Tensor


def program(x: Tensor, gate: Tensor, w: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.I})
    spmd.assert_type(gate, {"tp": spmd.I})
    spmd.assert_type(w, {"tp": spmd.S(1)})
    scores = spmd.convert(x @ gate, "tp", src=spmd.I, dst=spmd.R)
    rows = spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
    y = (rows @ w) * scores
    return spmd.assert_type(y, {"tp": spmd.S(1)})
