"""Extents of several runs per rank, and the names of all extents.

One run per rank: `Even`, `Padded`, `Ragged`, and what every extent answers, in `runs.py`.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from placements.runs import (
    Even,
    Extent,
    Padded,
    Ragged,
    Rows,
    check_ranks,
    check_total,
    look_up,
)


@dataclass(frozen=True, eq=False, repr=False)
class ZigZag(Extent):
    """Two equal runs per rank, the r-th from the front and the r-th from the back.

    So every rank has as many earlier rows to attend to: causal attention in balance.
    `total` must be a multiple of twice the ranks.
    """

    rows_in_all: int
    ranks: int | None = None

    def __post_init__(self) -> None:
        check_total("ZigZag", self.rows_in_all)
        self.key(self.ranks)

    def __repr__(self) -> str:
        return f"ZigZag({self.rows_in_all})"

    @property
    def total(self) -> int:
        return self.rows_in_all

    @property
    def run(self) -> int:
        """Rows of every run."""
        return self.rows_in_all // (2 * self.bound_ranks)

    def starts(self, rank: int) -> tuple[int, int]:
        """Global rows of the first rows of both runs."""
        return rank * self.run, (2 * self.bound_ranks - 1 - rank) * self.run

    def over(self, ranks: int) -> Extent:
        check_ranks(self, ranks)
        cut = replace(self, ranks=ranks)
        return Even(self.rows_in_all, ranks) if cut.is_even else cut

    def local_size(self, rank: int) -> int:
        return 2 * self.run

    def offset(self, rank: int) -> int:
        return self.starts(rank)[0]

    def to_global(self, index: Rows, rank: int) -> Rows:
        front, back = self.starts(rank)
        between = back - front - self.run  # rows of other ranks between the two runs
        return index + front + index // self.run * between

    def to_local(self, row: Rows) -> tuple[Rows, Rows]:
        number, place = row // self.run, row % self.run
        half = number // self.bound_ranks  # 0 for the runs in front, 1 for those behind
        rank = number + half * (2 * self.bound_ranks - 1 - 2 * number)
        return rank, place + half * self.run

    def scaled(self, factor: int) -> Extent:
        more = ZigZag(self.rows_in_all * factor)
        return more if self.ranks is None else more.over(self.ranks)

    def divided(self, factor: int) -> Extent | None:
        if factor == 0 or self.run % factor:
            return None
        return replace(self, rows_in_all=self.rows_in_all // factor)

    def key(self, ranks: int | None) -> tuple[Any, ...]:
        if ranks and self.rows_in_all % (2 * ranks):
            needed = self.rows_in_all + -self.rows_in_all % (2 * ranks)
            raise ValueError(
                f"ZigZag({self.rows_in_all}) is no two equal runs for each of {ranks} "
                f"ranks: pad to {needed} rows, a multiple of {2 * ranks}"
            )
        if ranks == 1 or self.rows_in_all == 0:
            return ("Even", self.rows_in_all)
        return ("ZigZag", self.rows_in_all)


class Folded(Extent):
    """`outer` blocks, each cut like `inner`: what flattening `(B, L@axis)` makes."""

    outer: int
    inner: Extent

    def __init__(self, outer: int, inner: Extent, ranks: int | None = None) -> None:
        if outer < 0:
            raise ValueError(f"Folded needs at least 0 blocks, got {outer}")
        if isinstance(inner, Folded):
            outer, inner = outer * inner.outer, inner.inner
        self.outer = outer
        self.inner = inner if ranks is None else inner.over(ranks)
        self.ranks = self.inner.ranks

    def __repr__(self) -> str:
        return f"Folded({self.outer}, {self.inner!r})"

    @property
    def total(self) -> int:
        return self.outer * self.inner.total

    def over(self, ranks: int) -> Extent:
        check_ranks(self, ranks)
        return (
            self.inner.over(ranks)
            if self.outer == 1
            else Folded(self.outer, self.inner, ranks)
        )

    def local_size(self, rank: int) -> int:
        return self.outer * self.inner.local_size(rank)

    def offset(self, rank: int) -> int:
        return self.inner.offset(rank)

    def to_global(self, index: Rows, rank: int) -> Rows:
        # The divisor is the length that this rank holds, not the padded one.
        length = self.inner.local_size(rank)
        if length == 0:
            return index
        block, place = index // length, index % length
        return block * self.inner.total + self.inner.to_global(place, rank)

    def to_local(self, row: Rows) -> tuple[Rows, Rows]:
        block, place = row // self.inner.total, row % self.inner.total
        rank, index = self.inner.to_local(place)
        if isinstance(rank, Tensor):
            return rank, block * look_up(self.inner.sizes, rank) + index
        return rank, block * self.inner.local_size(rank) + index

    def scaled(self, factor: int) -> Extent:
        return Folded(self.outer, self.inner.scaled(factor))

    def divided(self, factor: int) -> Extent | None:
        inner = self.inner.divided(factor)
        return None if inner is None else Folded(self.outer, inner)

    def key(self, ranks: int | None) -> tuple[Any, ...]:
        inner = self.inner.key(ranks)
        return inner if self.outer == 1 else ("Folded", self.outer, *inner)


def fold(outer: int, inner: Extent) -> Extent:
    """`Folded(outer, inner)`, under its plain name where one block is all there is."""
    return inner if outer == 1 else Folded(outer, inner)


__all__ = ["Even", "Extent", "Folded", "Padded", "Ragged", "Rows", "ZigZag", "fold"]
