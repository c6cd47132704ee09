"""A piece goes to rank times its own length, as if all pieces were as long: the last rank,
whose piece is shorter, writes over a row of the one before it (B44: torchtitan #3577,
mended in steps up to #3664). Lengths that divide hide it. Here the length of a piece is a
number that differs by rank, and what it selects is a piece of its own, no part of the whole
buffer."""

import spmd_types as spmd
import torch
from torch import Tensor
from torch.nn.functional import pad

from examples.migrate.uneven_sequences.before import summed
from examples.migrate.uneven_sequences.one_device import TOKENS
from placements import I, P, all_reduce, assert_type, axis_rank
from placements.testing import device_mesh


def before(x: Tensor) -> Tensor:
    tokens, rank = x.shape[0], device_mesh().get_local_rank("tp")
    start = rank * tokens
    return summed(pad(x.square(), (0, 0, start, TOKENS - start - tokens)))


def after_placements(x: Tensor) -> Tensor:
    tokens, rank = x.shape[0], axis_rank("tp")
    full = assert_type(torch.zeros(TOKENS, 4, dtype=x.dtype), {"tp": P})
    full[rank * tokens : (rank + 1) * tokens] = x.square()
    return all_reduce(full, "tp", src=P, dst=I)


@spmd.local_map(out_types={"tp": spmd.P})
def placed(x: Tensor) -> Tensor:
    tokens, rank = x.shape[0], device_mesh().get_local_rank("tp")
    start = rank * tokens
    full = pad(x.square(), (0, 0, start, TOKENS - start - tokens))
    return spmd.reinterpret(full, "tp", src=spmd.V, dst=spmd.P)


def after_spmd_types(x: Tensor) -> Tensor:
    y = placed(spmd.assert_type(x, {"tp": spmd.V}))
    return spmd.all_reduce(y, "tp", src=spmd.P, dst=spmd.I)
