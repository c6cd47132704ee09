"""Global mode refuses to flatten a cut inner dim, so this is a `local_map`, and inside of
it a number is a number: the arithmetic stays, and nobody checks it."""

import spmd_types as spmd
import torch
from torch import Tensor

from examples.migrate.token_indices.one_device import LENGTH, SEQUENCES
from placements.testing import device_mesh


def placed(x: Tensor, token: Tensor) -> Tensor:
    rows = x.flatten(0, 1).square()
    y = torch.zeros(SEQUENCES * LENGTH, x.shape[2], dtype=x.dtype)
    return spmd.reinterpret(y.index_add(0, token, rows), "tp", src=spmd.V, dst=spmd.P)


@spmd.local_map(out_types={"tp": spmd.P})
def combined(x: Tensor) -> Tensor:
    length, rank = x.shape[1], device_mesh().get_local_rank("tp")
    here = torch.arange(x.shape[0] * length)
    sequence = torch.div(here, length, rounding_mode="floor")
    return placed(x, sequence * LENGTH + rank * length + here % length)


def program(x: Tensor) -> Tensor:
    spmd.assert_type(x, {"tp": spmd.S(1)})
    return spmd.all_reduce(combined(x), "tp", src=spmd.P, dst=spmd.I)
