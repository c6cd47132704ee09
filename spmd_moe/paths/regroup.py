"""Rows that arrived sender by sender become rows expert by expert, and back.

What a rank receives lies by (sender, expert); the experts want it by (expert, sender).
There are several ways to the same order, and one that pads:

    ByView       all parts are equally long: two dims change places, and nothing is sorted
    ByParts      the host knows the lengths of few parts: they are put together anew
    ByIndex      any lengths: the rows are sorted on the device
    ByPaddedIndex    for experts that compute in narrow dtypes, in blocks: each expert's
                 rows are padded with zero rows to a multiple of the block size
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from placements import Index, assert_type, type_of, unchecked
from spmd_moe.dims import MD, CountsG, IndexM
from spmd_moe.paths.agreement import Agreed
from spmd_moe.paths.recorder import ran
from spmd_moe.permute import inverse, on_host, regroup

# With more parts than this, one index is quicker than a list of parts.
PARTS = 64


@dataclass(frozen=True)
class AbstractRegrouping(ABC):
    """One order of rows; `counts_G` are the rows of each expert in it."""

    counts_G: CountsG
    counts_list: list[int] | None

    @abstractmethod
    def to_experts(self, rows_MD: MD) -> MD:
        """Rows by (sender, expert) -> by (expert, sender)."""

    @abstractmethod
    def to_senders(self, rows_MD: MD) -> MD:
        """Undo `to_experts`."""


Regrouper: TypeAlias = Callable[[Agreed, int], AbstractRegrouping]


@dataclass(frozen=True)
class ByIndex(AbstractRegrouping):
    """Any lengths: `order_M` gathers the rows, and its inverse gathers them back."""

    order_M: IndexM
    inverse_M: IndexM

    def to_experts(self, rows_MD: MD) -> MD:
        return rows_MD.index_select(0, self.order_M)

    def to_senders(self, rows_MD: MD) -> MD:
        return rows_MD.index_select(0, self.inverse_M)


@dataclass(frozen=True)
class ByView(AbstractRegrouping):
    """All parts have `length` rows: (sender, expert, row) -> (expert, sender, row)."""

    senders: int
    experts: int
    length: int

    def to_experts(self, rows_MD: MD) -> MD:
        ran("equal_count_permute")
        return self._swapped(rows_MD, self.senders, self.experts)

    def to_senders(self, rows_MD: MD) -> MD:
        ran("equal_count_unpermute")
        return self._swapped(rows_MD, self.experts, self.senders)

    def _swapped(self, rows_MD: MD, first: int, second: int) -> MD:
        parts = torch.unflatten(rows_MD, 0, (first, second, self.length))
        return parts.transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class ByParts(AbstractRegrouping):
    """The host knows the `lengths` of the parts, by (sender, expert)."""

    lengths: list[list[int]]

    def to_experts(self, rows_MD: MD) -> MD:
        ran("regroup_by_parts")
        return _parts_swapped(rows_MD, self.lengths)

    def to_senders(self, rows_MD: MD) -> MD:
        by_expert = [list(column) for column in zip(*self.lengths, strict=True)]
        return _parts_swapped(rows_MD, by_expert)


def _parts_swapped(rows_MD: MD, lengths: Sequence[Sequence[int]]) -> MD:
    inner = len(lengths[0])
    parts = torch.split(rows_MD, [length for row in lengths for length in row])
    return torch.cat([part for g in range(inner) for part in parts[g::inner]])


def regrouped(agreed: Agreed, num_rows: int) -> AbstractRegrouping:
    """Choose the cheapest way to the order."""
    counts_G, known = agreed.received_WG.sum(0), agreed.by_sender
    if known is not None:
        lengths = {length for row in known for length in row}
        if len(lengths) == 1:
            shape = len(known), len(known[0]), lengths.pop()
            return ByView(counts_G, agreed.counts_list, *shape)
        if len(known) * len(known[0]) <= PARTS:
            return ByParts(counts_G, agreed.counts_list, known)
    order_M = regroup(agreed.received_WG, num_rows)
    return ByIndex(counts_G, agreed.counts_list, order_M, inverse(order_M))


@dataclass(frozen=True)
class ByPaddedIndex(AbstractRegrouping):
    """Groups filled up with zero rows: `order_M` names the row after the last for these.

    That row, the sentinel, is zero going in, takes what the experts made of the zero rows
    coming back, and is dropped.
    """

    order_M: IndexM
    real_rows: int

    def to_experts(self, rows_MD: MD) -> MD:
        ran("padded_permute")
        sentinel = rows_MD.new_zeros(1, *rows_MD.shape[1:])
        return torch.cat([rows_MD, sentinel]).index_select(0, self.order_M)

    def to_senders(self, rows_MD: MD) -> MD:
        ran("padded_unpermute")
        return unpermute_padded(rows_MD, self.order_M, self.real_rows)


def unpermute_padded(
    rows: Tensor, order: Tensor, real_rows: int, rank_major_shape: Any = None
) -> Tensor:
    """Put row i of `rows` at place `order[i]` of real_rows + 1, and drop the last place.

    `rank_major_shape` is what an exchange of equal counts would undo by a view; there are
    rows of padding here, so it is refused.
    """
    if rank_major_shape is not None:
        raise ValueError(
            f"padded groups cannot be undone by the view {rank_major_shape!r}: they have "
            "rows of padding, which no view leaves out"
        )
    places = rows.new_zeros(real_rows + 1, *rows.shape[1:])
    return places.index_add(0, order, rows)[:real_rows]


@dataclass(frozen=True)
class PadGroups:
    """The regrouper of quantised dispatch: every group has a multiple of `multiple` rows.

    It never takes the view of equal counts, which would leave the padding out.
    """

    multiple: int

    def __post_init__(self) -> None:
        if self.multiple < 1:
            raise ValueError(f"multiple ({self.multiple}) must be at least 1")

    def __call__(self, agreed: Agreed, num_rows: int) -> AbstractRegrouping:
        order_M, known = regroup(agreed.received_WG, num_rows), agreed.counts_list
        types = type_of(order_M)
        with unchecked():  # places of rows; what is made of them gets its type below
            real: list[int] = on_host(agreed.received_WG.sum(0)) if known is None else known
            blocks = [-(-rows // self.multiple) for rows in real]
            padded = [n * self.multiple for n in blocks]
            parts: list[Tensor] = []
            for part, size in zip(torch.split(order_M, real), padded, strict=True):
                filling = part.new_full((size - part.shape[0],), num_rows)
                parts += [part, filling]
            order = torch.cat(parts)
            counts_G = order.new_tensor(padded)
        if types is not None:
            assert_type(order, types, index=Index(num_rows + 1))
            assert_type(counts_G, types)
        return ByPaddedIndex(counts_G, padded, order, num_rows)
