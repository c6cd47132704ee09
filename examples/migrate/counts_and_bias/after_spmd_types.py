"""The same calls. That counts are Partial is known in global mode."""

import spmd_types as spmd
from torch import Tensor

from examples.migrate.counts_and_bias.one_device import counted, updated


def declare(scores: Tensor, bias: Tensor) -> None:
    both = {"dp": spmd.V, "tp": spmd.V}
    rows = spmd.PartitionSpec(("dp", "tp"), None)
    spmd.assert_type(scores, both, partition_spec=rows)
    spmd.assert_type(bias, {"dp": spmd.R, "tp": spmd.R})


def program(scores: Tensor, bias: Tensor) -> Tensor:
    declare(scores, bias)
    counts = counted(scores, bias)
    for axis in ("dp", "tp"):
        counts = spmd.all_reduce(counts, axis, src=spmd.P, dst=spmd.R)
    return updated(bias, counts)
