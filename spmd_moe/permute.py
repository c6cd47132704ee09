"""Orders of slots and rows, and their inverses: pure functions on indices.

Every result is an index that says what it counts, because it was made by sorting and
selecting and never by arithmetic. An order and its inverse are an adjoint pair: gathering
rows by one is undone, and differentiated, by gathering by the other.
"""

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from placements import typed
from spmd_moe.dims import CountsE, CountsWG, IdsTK, IndexM, IndexN


@typed
def routing_map(expert_ids_TK: IdsTK, num_experts: int) -> Tensor:
    """ids placed as t -> bool (T, E) placed as t: which experts each token goes to.

    Writes along the expert dim, which is never cut, so the placement stays. The ids of a
    token must differ, as top-k's do.
    """
    tokens = expert_ids_TK.shape[0]
    empty_TE = torch.zeros(
        tokens, num_experts, dtype=torch.bool, device=expert_ids_TK.device
    )
    return empty_TE.scatter(1, expert_ids_TK, True)


@typed
def count_experts(expert_ids_TK: IdsTK, num_experts: int) -> CountsE:
    """ids Shard(0) -> counts Partial; Replicate -> Replicate; Varying -> Varying."""
    return routing_map(expert_ids_TK, num_experts).sum(0)


@typed
def sort_slots(expert_ids_TK: IdsTK) -> IndexN:
    """ids of this rank's own tokens -> its slots by expert; tokens in order within each."""
    return expert_ids_TK.flatten().argsort(stable=True)


@typed
def inverse(order_N: IndexN) -> IndexN:
    """A permutation -> the one that undoes it."""
    places_N = torch.arange(order_N.shape[0], device=order_N.device)
    return torch.zeros_like(order_N).scatter(0, order_N, places_N)


@typed
def regroup(received_WG: CountsWG, num_rows: int) -> IndexM:
    """Counts by (sender, expert) -> the order that takes rows by sender to rows by expert.

    `num_rows` is the number of rows received, which the host knows already.
    """
    senders, experts = received_WG.shape
    expert_ids_G = torch.arange(experts, device=received_WG.device)
    expert_of_row_M = expert_ids_G.repeat(senders).repeat_interleave(
        received_WG.flatten(), output_size=num_rows
    )
    return expert_of_row_M.argsort(stable=True)


def split_sizes(
    sent_WG: Tensor, received_WG: Tensor, num_rows: int, place: int
) -> tuple[list[int], list[int]]:
    """Counts by (rank, expert) -> rows to each rank and from each; waits for the device.

    Meta tensors have no values. There `num_rows` go to the experts in turn, as round robin
    has it, and every rank sends as many to this one, which is number `place`.
    """
    ranks, experts = sent_WG.shape
    if sent_WG.is_meta:
        turns, rest = divmod(num_rows, ranks * experts)
        before = [turns * e + min(rest, e) for e in range(0, ranks * experts + 1, experts)]
        sent = [end - start for start, end in pairwise(before)]
        return sent, [sent[place]] * ranks
    sizes = on_host(torch.cat([sent_WG.sum(1), received_WG.sum(1)]))
    return sizes[:ranks], sizes[ranks:]


def on_host(sizes: Tensor) -> list[int]:
    """Integers -> the same as a list; waits for the device."""
    return cast(Any, sizes).tolist()
