"""How many rows go from each rank of ep to each: the ways in which ranks can agree on it.

    ByExchange   every rank tells every other how many rows it sends       an all-to-all
    ByGather     every rank tells all the others everything it sends       an all-gather
    ByTurns      round robin: every rank knows without being told          nothing

Each gives the `Exchange` that carries the rows, whose splits it may make equal. Ranks must
make them equal together, and equally long, or the all-to-all hangs. So that is decided only
by who knows the splits of all ranks, from numbers that are the same on all of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from placements import (
    Mesh,
    Replicate,
    Varying,
    all_gather,
    all_to_all_start,
    assert_type,
    type_of,
    unchecked,
)
from spmd_moe.dims import CountsWG
from spmd_moe.paths.equal_split import Exchange
from spmd_moe.paths.recorder import ran
from spmd_moe.paths.round_robin import Turns
from spmd_moe.permute import split_sizes, table_on_host


@dataclass(frozen=True)
class Agreed:
    """What ranks agreed on: the exchange, and the rows here by (sender, expert).

    `by_sender` are the numbers of `received_WG` where the host knows them.
    """

    exchange: Exchange
    received_WG: CountsWG
    by_sender: list[list[int]] | None

    @property
    def counts_list(self) -> list[int] | None:
        """Return the rows of each expert here, where the host knows them."""
        known = self.by_sender
        return (
            None if known is None else [sum(column) for column in zip(*known, strict=True)]
        )


Agreeing: TypeAlias = Callable[[], Agreed]


class AbstractAgreement(ABC):
    """How ranks agree. All ranks of ep call it together, with the sparse mesh current."""

    @abstractmethod
    def start(
        self, counts_WG: CountsWG, num_rows: int, turns: Turns | None, mesh: Mesh
    ) -> Agreeing:
        """Begin with this rank's slots by (rank, expert); what is returned waits."""

    def is_known(self, turns: Turns | None) -> bool:
        """Return whether these turns alone say what goes where."""
        return False


@dataclass(frozen=True)
class ByExchange(AbstractAgreement):
    """Every rank tells every other how many rows it sends there: one all-to-all.

    It is under way until somebody waits.
    """

    def start(
        self, counts_WG: CountsWG, num_rows: int, turns: Turns | None, mesh: Mesh
    ) -> Agreeing:
        coming = all_to_all_start(counts_WG, "ep", src=Varying(), dst=Varying())
        place = mesh.coordinate["ep"]

        def finish() -> Agreed:
            received_WG = coming.wait()
            sent, received, known = split_sizes(counts_WG, received_WG, num_rows, place)
            return Agreed(Exchange(sent, received), received_WG, known)

        return finish


@dataclass(frozen=True)
class ByGather(AbstractAgreement):
    """Every rank tells all others what it sends to whom: one all-gather.

    So each knows all splits, and they are made equal where that costs no rank more than
    `max_padding` of its rows. Every rank finds the same, from the same numbers.
    """

    max_padding: float

    def start(
        self, counts_WG: CountsWG, num_rows: int, turns: Turns | None, mesh: Mesh
    ) -> Agreeing:
        place = mesh.coordinate["ep"]
        # by (sender, rank, expert)
        counts_QWG = all_gather(counts_WG, "ep", src=Varying(), dst=Replicate())
        received_WG = counts_QWG.select(1, place)
        if counts_WG.is_meta or torch.compiler.is_compiling():  # no numbers to decide from
            sent, received, known = split_sizes(counts_WG, received_WG, num_rows, place)
            return lambda: Agreed(Exchange(sent, received), received_WG, known)

        def finish() -> Agreed:
            with unchecked():  # numbers that decide how to send, and not what
                splits = table_on_host(counts_QWG.sum(2))
                known = table_on_host(received_WG)
            size = equal_size(splits, self.max_padding)
            exchange = Exchange(splits[place], [row[place] for row in splits], size)
            return Agreed(exchange, received_WG, known)

        return finish


@dataclass(frozen=True)
class ByTurns(AbstractAgreement):
    """Round robin, and equally many tokens on every rank: nobody needs to be told.

    What another router routed, and what is compiled, is agreed on `otherwise`.
    """

    otherwise: AbstractAgreement
    max_padding: float | None = None

    def is_known(self, turns: Turns | None) -> bool:
        return turns is not None

    def start(
        self, counts_WG: CountsWG, num_rows: int, turns: Turns | None, mesh: Mesh
    ) -> Agreeing:
        if turns is None:
            return self.otherwise.start(counts_WG, num_rows, turns, mesh)
        ran("round_robin_dispatch")
        self._claim_equal_tokens(counts_WG, turns)
        ranks, place = mesh.require("ep"), mesh.coordinate["ep"]
        by_rank = [turns.counts_of_rank(rank, ranks) for rank in range(ranks)]
        sent, mine = [sum(counts) for counts in by_rank], by_rank[place]
        size = None
        if self.max_padding is not None:
            size = equal_size([sent] * ranks, self.max_padding)
        with unchecked():
            received_WG = torch.tensor(mine, device=counts_WG.device).expand(ranks, -1)
        types = type_of(counts_WG)
        if types is not None:
            assert_type(received_WG, types)
        # All ranks send what this one sends, so from each come as many as it sends itself.
        exchange = Exchange(sent, [sent[place]] * ranks, size)
        agreed = Agreed(exchange, received_WG, [mine] * ranks)
        return lambda: agreed

    def _claim_equal_tokens(self, counts_WG: CountsWG, turns: Turns) -> None:
        """Say that the number of tokens is Replicate on ep; `verify()` compares it."""
        known = type_of(counts_WG)
        if known is not None:
            with unchecked():
                tokens = torch.tensor([turns.tokens])
            assert_type(tokens, {**known, "ep": Replicate()})


def equal_size(splits: Sequence[Sequence[int]], max_padding: float) -> int | None:
    """Return the size of equal splits, or None where they cost too much.

    `splits[q][w]` rows go from rank q to rank w. The cost to a rank is the rows of padding
    that it sends and receives, as a part of its real rows; to a rank without rows it is
    infinite. The rank to which it is highest decides.
    """
    size = max(max(row) for row in splits)
    costs: list[float] = []
    for rank, sent in enumerate(splits):
        real = sum(sent) + sum(row[rank] for row in splits)
        padding = 2 * len(splits) * size - real
        costs.append(padding / real if real else float("inf"))
    return size if size and max(costs) <= max_padding else None
