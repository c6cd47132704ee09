"""The same calls. In local mode the product of the second weight is Varying, and
`all_reduce` must take it as a Partial; in global mode it is Partial by itself."""

import spmd_types as spmd
from torch import Tensor


def program(x: Tensor, w1: Tensor, w2: Tensor, shared: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.I})
    spmd.assert_type(w1, {"tp": spmd.S(1)})
    spmd.assert_type(w2, {"tp": spmd.S(0)})
    spmd.assert_type(shared, {"tp": spmd.I})
    routed = (spmd.convert(x, "tp", src=spmd.I, dst=spmd.R) @ w1).square() @ w2
    return spmd.all_reduce(routed, "tp", src=spmd.P, dst=spmd.I) + x @ shared
