"""The same calls."""

import spmd_types as spmd
from torch import Tensor

from examples.migrate.sequence_parallel_norms.one_device import rms_norm


def program(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.S(0)})
    spmd.assert_type(norm, {"tp": spmd.I})
    spmd.assert_type(w, {"tp": spmd.S(1)})
    rows = rms_norm(x, spmd.convert(norm, "tp", src=spmd.I, dst=spmd.R))
    y = spmd.all_gather(rows, "tp", src=spmd.S(0), dst=spmd.R) @ w
    return spmd.assert_type(y, {"tp": spmd.S(1)})
