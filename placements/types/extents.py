"""How a tensor dim is cut into pieces over the ranks of one mesh axis.

An extent answers, for every rank, how many rows it holds and which global rows those
are. It is arithmetic on sizes only: it knows neither tensors' types nor meshes.

An extent may be written before the number of ranks is known (`Padded(5)`); a type that
belongs to a mesh holds it bound (`Padded(5).over(2)`). Two extents are equal if every
rank holds the same rows, whatever they are called: `Padded(8) == Even(8)` over 4 ranks.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor

from placements.types.kept import kept

# Row numbers may be Python ints, SymInts or integer tensors; the arithmetic is the same.
Rows: TypeAlias = Any


class Extent(ABC):
    """Which rows of a dim each rank of an axis holds."""

    ranks: int | None

    @property
    @abstractmethod
    def total(self) -> int:
        """Rows on all ranks together."""

    @abstractmethod
    def over(self, ranks: int) -> "Extent":
        """Return the same extent, bound to an axis of that many ranks."""

    @abstractmethod
    def local_size(self, rank: int) -> int:
        """Return how many rows `rank` holds."""

    @abstractmethod
    def offset(self, rank: int) -> int:
        """Return the global row of the first row that `rank` holds (or would hold)."""

    @abstractmethod
    def to_global(self, index: Rows, rank: int) -> Rows:
        """Return the global row of row `index` of `rank`."""

    @abstractmethod
    def to_local(self, row: Rows) -> tuple[Rows, Rows]:
        """Return the rank that holds global row `row`, and the row's number there."""

    @abstractmethod
    def scaled(self, factor: int) -> "Extent":
        """Return the extent of the dim after each row became `factor` rows."""

    def divided(self, factor: int) -> "Extent | None":
        """Return the extent whose `scaled(factor)` this is, if there is one."""
        if factor == 0 or any(size % factor for size in self.sizes):
            return None
        return Ragged(*(size // factor for size in self.sizes)).canonical()

    @abstractmethod
    def key(self, ranks: int | None) -> tuple[Any, ...]:
        """Return what tells this extent from others over that many ranks."""

    @property
    def bound_ranks(self) -> int:
        if self.ranks is None:
            raise ValueError(
                f"{self!r} does not say over how many ranks it is cut; "
                f"write {self!r}.over(n)"
            )
        return self.ranks

    @kept
    def sizes(self) -> tuple[int, ...]:
        """Rows by rank."""
        return tuple(self.local_size(rank) for rank in range(self.bound_ranks))

    @property
    def equal_sizes(self) -> bool:
        """Whether all ranks hold equally many rows, which need not stand together."""
        return len(set(self.sizes)) == 1

    @property
    def is_even(self) -> bool:
        return self.key(self.ranks)[0] == "Even"

    def rows(self, rank: int) -> list[int]:
        """Return the global rows of `rank`, in the order in which it holds them."""
        return [self.to_global(i, rank) for i in range(self.local_size(rank))]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Extent):
            return NotImplemented
        if self.total != other.total:
            return False
        if self.ranks and other.ranks and self.ranks != other.ranks:
            return False
        ranks = self.ranks or other.ranks
        try:
            return self.key(ranks) == other.key(ranks)
        except ValueError:  # it does not divide over the other's ranks
            return False

    def __hash__(self) -> int:
        return hash(self.total)


def check_ranks(extent: Extent, ranks: int) -> None:
    if ranks < 1:
        raise ValueError(f"an axis has at least 1 rank, got {ranks}")
    if extent.ranks not in (None, ranks):
        raise ValueError(f"{extent!r} is over {extent.ranks} ranks, not over {ranks}")


@dataclass(frozen=True, eq=False, repr=False)
class _OfTotal(Extent):
    """An extent that the number of all rows, and that of ranks, say."""

    rows_in_all: int
    ranks: int | None = None

    def __post_init__(self) -> None:
        if self.rows_in_all < 0:
            raise ValueError(f"{self!r}: the number of rows must be at least 0")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows_in_all})"

    @property
    def total(self) -> int:
        return self.rows_in_all


class Even(_OfTotal):
    """Equal pieces in rank order; `total` must be a multiple of the ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ranks and self.rows_in_all % self.ranks:
            raise ValueError(
                f"Even({self.rows_in_all}) does not divide over {self.ranks} ranks; "
                f"write Padded({self.rows_in_all}) for pieces of unequal length"
            )

    def over(self, ranks: int) -> "Even":
        check_ranks(self, ranks)
        return replace(self, ranks=ranks)

    def local_size(self, rank: int) -> int:
        return self.rows_in_all // self.bound_ranks

    @kept
    def sizes(self) -> tuple[int, ...]:
        return (self.rows_in_all // self.bound_ranks,) * self.bound_ranks

    def offset(self, rank: int) -> int:
        return rank * self.local_size(rank)

    def to_global(self, index: Rows, rank: int) -> Rows:
        return index + self.offset(rank)

    def to_local(self, row: Rows) -> tuple[Rows, Rows]:
        size = self.local_size(0)
        return row // size, row % size

    def scaled(self, factor: int) -> Extent:
        return replace(self, rows_in_all=self.rows_in_all * factor)

    def key(self, ranks: int | None) -> tuple[Any, ...]:
        if ranks and self.rows_in_all % ranks:
            raise ValueError(f"{self!r} does not divide over {ranks} ranks")
        return ("Even", self.rows_in_all)


class Padded(_OfTotal):
    """Pieces of `ceil(total / ranks)` rows; the last ones are shorter or empty.

    The padding is virtual: no rank holds a pad row.
    """

    @property
    def stride(self) -> int:
        """Rows of every full piece."""
        return -(-self.rows_in_all // self.bound_ranks)

    def over(self, ranks: int) -> Extent:
        check_ranks(self, ranks)
        if self.rows_in_all % ranks == 0:
            return Even(self.rows_in_all, ranks)
        return replace(self, ranks=ranks)

    def local_size(self, rank: int) -> int:
        return min(max(self.rows_in_all - rank * self.stride, 0), self.stride)

    def offset(self, rank: int) -> int:
        return min(rank * self.stride, self.rows_in_all)

    def to_global(self, index: Rows, rank: int) -> Rows:
        return index + rank * self.stride

    def to_local(self, row: Rows) -> tuple[Rows, Rows]:
        return row // self.stride, row % self.stride

    def scaled(self, factor: int) -> Extent:
        return Ragged(*(size * factor for size in self.sizes)).canonical()

    def key(self, ranks: int | None) -> tuple[Any, ...]:
        if ranks and self.rows_in_all % ranks == 0:
            return ("Even", self.rows_in_all)
        return ("Padded", self.rows_in_all)


class Ragged(Extent):
    """Pieces of the stated sizes, in rank order."""

    def __init__(self, *sizes: int | tuple[int, ...] | list[int]) -> None:
        flat: list[int] = []
        for size in sizes:
            flat.extend(size if isinstance(size, tuple | list) else (size,))
        if not flat or min(flat) < 0:
            raise ValueError(f"Ragged needs one size of at least 0 per rank, got {flat}")
        self._sizes = tuple(flat)
        self._starts = (0, *accumulate(self._sizes))
        self.ranks = len(self._sizes)

    def __repr__(self) -> str:
        return f"Ragged({', '.join(map(str, self._sizes))})"

    @property
    def total(self) -> int:
        return self._starts[-1]

    def over(self, ranks: int) -> Extent:
        check_ranks(self, ranks)
        return self.canonical()

    def canonical(self) -> Extent:
        """Return the same pieces as Even or Padded, if they are that."""
        for named in (Even, Padded):
            if self.key(None)[0] == named.__name__:
                return named(self.total, self.ranks)
        return self

    def local_size(self, rank: int) -> int:
        return self._sizes[rank]

    def offset(self, rank: int) -> int:
        return self._starts[rank]

    def to_global(self, index: Rows, rank: int) -> Rows:
        return index + self._starts[rank]

    def to_local(self, row: Rows) -> tuple[Rows, Rows]:
        starts = torch.tensor(self._starts[1:])
        if isinstance(row, Tensor):
            rank = torch.searchsorted(starts.to(row.device), row, right=True)
            return rank, row - look_up(self._starts, rank)
        owner = int(torch.searchsorted(starts, row, right=True))
        return owner, row - self._starts[owner]

    def scaled(self, factor: int) -> Extent:
        return Ragged(*(size * factor for size in self._sizes)).canonical()

    def key(self, ranks: int | None) -> tuple[Any, ...]:
        count, total = len(self._sizes), self.total
        if total % count == 0 and set(self._sizes) == {total // count}:
            return ("Even", total)
        if self._sizes == Padded(total, count).sizes:
            return ("Padded", total)
        return ("Ragged", self._sizes)


def look_up(table: tuple[int, ...], rank: Tensor) -> Tensor:
    return torch.tensor(table, device=rank.device)[rank]


class ZigZag(_OfTotal):
    """Two equal runs per rank, the r-th from the front and the r-th from the back.

    So all ranks have equally many earlier rows to attend to, which balances causal
    attention. `total` must be a multiple of twice the ranks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.key(self.ranks)

    @property
    def run(self) -> int:
        """Rows of every run."""
        return self.rows_in_all // (2 * self.bound_ranks)

    def starts(self, rank: int) -> tuple[int, int]:
        """Return the global rows of the first rows of both runs."""
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
                f"ZigZag({self.rows_in_all}) does not give two equal runs to each of "
                f"{ranks} ranks: pad to {needed} rows, a multiple of {2 * ranks}"
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
    """`Folded(outer, inner)`, or `inner` itself if there is only one block."""
    return inner if outer == 1 else Folded(outer, inner)


__all__ = ["Even", "Extent", "Folded", "Padded", "Ragged", "Rows", "ZigZag", "fold"]
