"""The same call. A weight declared R leaves the sum to the trainer, of which the types know
nothing."""

import spmd_types as spmd
from torch import Tensor


def program(x: Tensor, gate: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.S(0)})
    spmd.assert_type(gate, {"tp": spmd.I})
    y = x @ spmd.convert(gate, "tp", src=spmd.I, dst=spmd.R)
    return spmd.assert_type(y, {"tp": spmd.S(0)})
