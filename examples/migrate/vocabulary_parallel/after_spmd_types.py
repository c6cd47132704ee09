"""Both lookups go by this rank's number, which global mode does not follow: each is a
`local_map`, which says what comes out of it."""

import spmd_types as spmd
from torch import Tensor

from placements.testing import device_mesh


@spmd.local_map(out_types={"tp": spmd.P})
def looked_up(ids: Tensor, table: Tensor) -> Tensor:
    first = device_mesh().get_local_rank("tp") * table.shape[0]
    outside = (ids < first) | (ids >= first + table.shape[0])
    found = table[(ids - first).masked_fill(outside, 0)]
    found = found.masked_fill(outside.view(-1, *[1] * (found.dim() - 1)), 0)
    return spmd.reinterpret(found, "tp", src=spmd.V, dst=spmd.P)


@spmd.local_map(out_types={"tp": spmd.P})
def targets(labels: Tensor, logits: Tensor) -> Tensor:
    first = device_mesh().get_local_rank("tp") * logits.shape[1]
    outside = (labels < first) | (labels >= first + logits.shape[1])
    row = (labels - first).masked_fill(outside, 0)
    found = logits.gather(1, row.unsqueeze(1)).squeeze(1).masked_fill(outside, 0)
    return spmd.reinterpret(found, "tp", src=spmd.V, dst=spmd.P)


def vocab_parallel_loss(logits: Tensor, labels: Tensor) -> Tensor:
    spmd.assert_type(logits, {"tp": spmd.S(1)})
    used = spmd.convert(labels, "tp", src=spmd.I, dst=spmd.R)
    target = spmd.all_reduce(targets(used, logits), "tp", src=spmd.P, dst=spmd.I)
    total = spmd.all_reduce(logits.square().sum(1), "tp", src=spmd.P, dst=spmd.I)
    return (total - 2 * target).sum()


def program(ids: Tensor, labels: Tensor, table: Tensor) -> Tensor:
    spmd.assert_type(ids, {"tp": spmd.I})
    spmd.assert_type(labels, {"tp": spmd.I})
    spmd.assert_type(table, {"tp": spmd.S(0)})
    used = spmd.convert(ids, "tp", src=spmd.I, dst=spmd.R)
    x = spmd.all_reduce(looked_up(used, table), "tp", src=spmd.P, dst=spmd.I)
    x = spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)
    return vocab_parallel_loss(x @ table.T, labels)
