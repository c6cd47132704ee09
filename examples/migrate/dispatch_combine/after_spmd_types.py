"""The same, in a `local_map` for global mode. Its collectives have their backward, too.
`reinterpret_mesh` raises where nothing is checked, so it is called with a condition."""

from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor

from examples.migrate.dispatch_combine.one_device import EXPERTS, SPARSE
from placements.testing import device_mesh

OWN = {"dp": spmd.V, "tp": spmd.V}


def declare_cut(x: Tensor) -> Tensor:
    spec = spmd.PartitionSpec(("dp", "tp"), *[None] * (x.dim() - 1))
    return spmd.assert_type(x, OWN, partition_spec=spec)


def presented(x: Tensor, types: dict[str, Any]) -> Tensor:
    return spmd.reinterpret_mesh(x, types) if spmd.is_type_checking() else x


def send(x: Tensor, sent: list[int], received: list[int]) -> Tensor:
    return spmd.all_to_all(
        x.contiguous(), "ep", src=spmd.V, dst=spmd.V,
        input_split_sizes=sent, output_split_sizes=received,
    )  # fmt: skip


def splits(ids: Tensor) -> tuple[list[int], list[int]]:
    counts = torch.bincount(ids, minlength=EXPERTS)
    one = [1] * EXPERTS
    return counts.tolist(), send(counts, one, one).tolist()


@spmd.local_map(out_types=(OWN, spmd.PartitionSpec(("dp", "tp"), None)))
def exchanged(x: Tensor, gates: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    with spmd.set_current_mesh(device_mesh(SPARSE)):
        x, gates, ids, w = (presented(held, {"ep": spmd.V}) for held in (x, gates, ids, w))
        sent, received = splits(ids)
        order = ids.argsort(stable=True)
        rows = send(x[order], sent, received)
        weights = send(gates[order], sent, received)
        computed = (rows @ w[0]) * weights.unsqueeze(1)
        back = send(computed, received, sent)[order.argsort()]
    return presented(back, OWN)


def program(x: Tensor, gates: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    for held in (x, gates, ids, w):
        declare_cut(held)
    return exchanged(x, gates, ids, w)
