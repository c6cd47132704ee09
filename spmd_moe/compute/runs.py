"""Consecutive experts whose rows are multiplied by one call.

A product of half precision costs about 15 us for its call, whatever its sizes are. Experts
that follow each other lie in memory as one batch, so one call does for all of them, if
their rows are padded with zeros to equal counts. That pays while the rows of padding are
fewer than could be multiplied in the time of the calls that are saved. Zeros stay zeros in
every product, and add nothing to a gradient.

An expert without rows is in no batch: its weights would be read for nothing. One with many
rows is alone too: what lies between its products is to stay in the cache.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

# So many multiplications with zeros take as long as a call. A batch of so many experts has
# saved nearly all that there is to save, and beside so many rows a call is nothing.
WORTH_A_CALL, LONGEST, MANY_ROWS = 6_000_000, 16, 128


@dataclass(frozen=True)
class Run:
    """The experts from `start` up to `end`, each with as many rows as the widest."""

    start: int
    end: int
    width: int

    @property
    def rows(self) -> int:
        return (self.end - self.start) * self.width


class Runs:
    """The rows of each expert, and how they are cut into runs."""

    def __init__(self, counts: list[int], size: int | None) -> None:
        """Cut into runs of one expert each, unless `size` says how large a matrix is."""
        self._are_batches = size is not None
        self.runs: list[Run] = []
        for expert, count in enumerate(counts):
            run = Run(expert, expert + 1, count)
            if self.runs and size is not None:
                joined = _joined(self.runs[-1], count, size)
                if joined is not None:
                    self.runs.pop()
                    run = joined
            self.runs.append(run)
        self._rows = sum(run.rows for run in self.runs)
        self._places_N: Tensor | None = None
        if self._rows > sum(counts):
            self._places_N = torch.tensor(_places(self.runs, counts))

    def batches(self, rows_NK: Tensor) -> Sequence[Tensor]:
        """Return views of the rows of each run: batches, or rows of the one expert."""
        parts = cast(Any, rows_NK).split([run.rows for run in self.runs])
        if not self._are_batches:
            return parts
        return [
            part.view(run.end - run.start, run.width, rows_NK.shape[1])
            for run, part in zip(self.runs, parts, strict=True)
        ]

    def matrices(self, weights_GKN: Tensor) -> Sequence[Tensor]:
        """Return views of the matrices of each run: batches, or the one matrix."""
        if not self._are_batches:
            return weights_GKN.unbind(0)
        return cast(Any, weights_GKN).split([run.end - run.start for run in self.runs])

    def padded(self, rows_NK: Tensor) -> Tensor:
        """Return the rows with rows of zeros in between."""
        if self._places_N is None:
            return rows_NK
        return self.empty(rows_NK).zero_().index_copy_(0, self._places_N, rows_NK)

    def empty(self, rows_NK: Tensor, columns: int | None = None) -> Tensor:
        """Return memory for the rows with their padding."""
        columns = rows_NK.shape[1] if columns is None else columns
        return rows_NK.new_empty(self._rows, columns)

    def unpadded(self, rows_NK: Tensor) -> Tensor:
        """Return the rows without those of padding."""
        if self._places_N is None:
            return rows_NK
        return rows_NK.index_select(0, self._places_N)


def _joined(run: Run, count: int, size: int) -> Run | None:
    """Return a run with the next expert, if that is faster than a call of its own."""
    experts, widest = run.end - run.start, max(run.width, count)
    padding = experts * (widest - run.width) + widest - count
    if run.width == 0 or count == 0:
        is_faster = run.width == count
    else:
        few = experts < LONGEST and widest < MANY_ROWS
        is_faster = few and padding * size <= WORTH_A_CALL
    return Run(run.start, run.end + 1, widest) if is_faster else None


def _places(runs: list[Run], counts: list[int]) -> list[int]:
    """Return where each row is among the rows with padding."""
    places: list[int] = []
    first = 0
    for run in runs:
        for count in counts[run.start : run.end]:
            places += range(first, first + count)
            first += run.width
    return places
