"""Unequal pieces are no Shard there. They are Varying, in a `local_map`, and nothing checks
where they go. (Its `all_gather` takes `split_sizes`, but sends them by a call of torch that
neither gloo nor simulated ranks have.)"""

import spmd_types as spmd
import torch
from torch import Tensor
from torch.nn.functional import pad

from examples.migrate.uneven_sequences.one_device import TOKENS
from placements.testing import device_mesh


@spmd.local_map(out_types={"tp": spmd.P})
def placed(x: Tensor) -> Tensor:
    ranks, rank = device_mesh().size(), device_mesh().get_local_rank("tp")
    sizes = [len(piece) for piece in torch.arange(TOKENS).chunk(ranks)]
    full = pad(x.square(), (0, 0, sum(sizes[:rank]), sum(sizes[rank + 1 :])))
    return spmd.reinterpret(full, "tp", src=spmd.V, dst=spmd.P)


def program(x: Tensor) -> Tensor:
    y = placed(spmd.assert_type(x, {"tp": spmd.V}))
    return spmd.all_reduce(y, "tp", src=spmd.P, dst=spmd.I)
