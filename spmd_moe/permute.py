"""Orders of slots and rows, and their inverses: pure functions on indices.

Every result is an index that says what it counts, because it was made by sorting and
selecting and never by arithmetic. An order and its inverse are an adjoint pair: gathering
rows by one is undone, and differentiated, by gathering by the other.
"""

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from placements import typed, unchecked
from spmd_moe.dims import CountsE, CountsWG, IdsTK, IndexM, IndexN, MapTE


@typed
def routing_map(expert_ids_TK: IdsTK, num_experts: int) -> MapTE:
    """ids placed as t -> (T, E) placed as t: how often each token goes to each expert.

    Writes along the expert dim, which is never cut, so the placement stays. Each entry is 0
    or 1 where the ids of a token differ, as those of a top-k do; equal ids are counted.
    """
    tokens = expert_ids_TK.shape[0]
    empty_TE = torch.zeros(
        tokens, num_experts, dtype=torch.int32, device=expert_ids_TK.device
    )
    ones_TK = torch.ones_like(expert_ids_TK, dtype=torch.int32)
    return empty_TE.scatter_add(1, expert_ids_TK, ones_TK)


@typed
def count_experts(expert_ids_TK: IdsTK, num_experts: int) -> CountsE:
    """ids Shard(0) -> counts Partial; Replicate -> Replicate; Varying -> Varying."""
    check_ids(expert_ids_TK, num_experts)
    return routing_map(expert_ids_TK, num_experts).sum(0)


@typed
def count_own(expert_ids_TK: IdsTK, num_experts: int) -> CountsE:
    """ids of this rank's own tokens -> its own counts, Varying where the ids are.

    The same numbers as `count_experts` gives, without the (T, E) map. The ids were checked
    when they entered the routing.
    """
    ids_N = expert_ids_TK.flatten()
    none_E = torch.zeros(num_experts, dtype=torch.int64, device=ids_N.device)
    return none_E.scatter_add(0, ids_N, torch.ones_like(ids_N))


def check_ids(expert_ids_TK: Tensor, num_experts: int) -> None:
    """Raise ValueError unless every id is that of an expert.

    Looks where looking costs no wait, on a CPU. Elsewhere it is left to the kernels, which
    stop the program at an index out of range.
    """
    has_values = expert_ids_TK.device.type == "cpu" and not is_dispatched(expert_ids_TK)
    if not has_values or torch.compiler.is_compiling():
        return
    with unchecked():  # the result of this check is not used in the computation
        if expert_ids_TK.numel() == 0:
            return
        least, most = (int(end) for end in expert_ids_TK.aminmax())
    if least < 0 or most >= num_experts:
        wrong = least if least < 0 else most
        raise ValueError(
            f"expert_ids_TK has the id {wrong}, but ids must be from 0 to "
            f"{num_experts - 1}: there are {num_experts} experts"
        )


def is_dispatched(x: Tensor) -> bool:
    """Return whether a subclass computes by itself: its values may be elsewhere."""
    return cast(Any, type(x)).__torch_dispatch__ is not cast(Any, Tensor).__torch_dispatch__


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
) -> tuple[list[int], list[int], list[list[int]] | None]:
    """Counts by (rank, expert) -> rows to each rank, from each, and from each by expert.

    Waits for the device, once for all of them. Compiled code gets only the splits, since
    every number more is a symbol more. Meta tensors have no values: there `num_rows` go to
    the experts in turn, as round robin has it, and every rank sends as many to this one,
    which is number `place`.
    """
    ranks, experts = sent_WG.shape
    if sent_WG.is_meta:
        with unchecked():  # the stand-in is the same for every rank: a plain number
            turns, rest = divmod(int(num_rows), int(ranks * experts))
        before = [turns * e + min(rest, e) for e in range(0, ranks * experts + 1, experts)]
        sent = [end - start for start, end in pairwise(before)]
        return sent, [sent[place]] * ranks, None
    if torch.compiler.is_compiling():
        sizes = on_host(torch.cat([sent_WG.sum(1), received_WG.sum(1)]))
        return sizes[:ranks], sizes[ranks:], None
    with (
        unchecked()
    ):  # plain numbers: what a rank decides by them is no other rank's matter
        numbers = on_host(torch.cat([sent_WG.sum(1), received_WG.flatten()]))
    flat = numbers[ranks:]
    by_sender = [flat[start : start + experts] for start in range(0, len(flat), experts)]
    return numbers[:ranks], [sum(row) for row in by_sender], by_sender


def on_host(sizes: Tensor) -> list[int]:
    """Integers -> the same as a list; waits for the device."""
    return cast(Any, sizes).tolist()


def table_on_host(counts_WG: CountsWG) -> list[list[int]]:
    """Integers by two dims -> the same as a list of lists; waits for the device."""
    return cast(Any, counts_WG).tolist()
