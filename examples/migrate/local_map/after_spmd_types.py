"""Its `local_map` switches to local mode inside, and declares no gradients: they follow
from R, I, V and P. In local mode the result of the body is Varying, so the body says by
`reinterpret` that it is a summand."""

import spmd_types as spmd
from torch import Tensor

from examples.migrate.local_map.one_device import experts


@spmd.local_map(
    in_types=({"tp": spmd.R}, {"tp": spmd.S(1)}, {"tp": spmd.S(0)}),
    out_types={"tp": spmd.P},
)
def run(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return spmd.reinterpret(experts(x, w1, w2), "tp", src=spmd.V, dst=spmd.P)


def program(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.I})
    spmd.assert_type(w1, {"tp": spmd.S(1)})
    spmd.assert_type(w2, {"tp": spmd.S(0)})
    y = run(spmd.convert(x, "tp", src=spmd.I, dst=spmd.R), w1, w2)
    return spmd.all_reduce(y, "tp", src=spmd.P, dst=spmd.I)
