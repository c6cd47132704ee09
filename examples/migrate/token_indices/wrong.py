"""The place of a row is taken for its number here plus rank times rows, as if each rank
had one run of all tokens. With one sequence in the batch that is right, which is how it
passed its tests (B35: torchtitan #3604). Here what arithmetic made may read, but not say
where to write."""

import spmd_types as spmd
import torch
from torch import Tensor

from examples.migrate.token_indices.after_spmd_types import placed
from examples.migrate.token_indices.before import ReduceFromTp
from examples.migrate.token_indices.one_device import LENGTH, SEQUENCES
from placements import I, P, all_reduce, assert_type, axis_rank
from placements.testing import device_mesh


def before(x: Tensor) -> Tensor:
    rows = x.flatten(0, 1).square()
    rank = device_mesh().get_local_rank("tp")
    token = torch.arange(rows.shape[0]) + rank * rows.shape[0]
    y = rows.new_zeros(SEQUENCES * LENGTH, x.shape[2]).index_add(0, token, rows)
    return ReduceFromTp.apply(y)


def after_placements(x: Tensor) -> Tensor:
    rows = x.flatten(0, 1).square()
    token = torch.arange(rows.shape[0]) + axis_rank("tp") * rows.shape[0]
    empty = torch.zeros(SEQUENCES * LENGTH, 4, dtype=rows.dtype)
    y = assert_type(empty, {"tp": P}).index_add(0, token, rows)
    return all_reduce(y, "tp", src=P, dst=I)


@spmd.local_map(out_types={"tp": spmd.P})
def combined(x: Tensor) -> Tensor:
    rows, rank = x.shape[0] * x.shape[1], device_mesh().get_local_rank("tp")
    return placed(x, torch.arange(rows) + rank * rows)


def after_spmd_types(x: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.S(1)})
    return spmd.all_reduce(combined(x), "tp", src=spmd.P, dst=spmd.I)
