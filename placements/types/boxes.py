"""Which parts of a global tensor a rank holds, as boxes: runs of rows in every dim.

A checkpoint that is cut into pieces names each of them by its place in the global tensor.
Most pieces are one box. An extent whose rows do not stand together gives several.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from placements.types.extents import Even, Extent, Folded, Padded, Ragged, ZigZag
from placements.types.tensor import TensorType

# Rows that stand together: the first one, and how many there are.
Run = tuple[int, int]


class Box(NamedTuple):
    """A part of a global tensor, and where this rank holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: tuple[int, ...]  # offsets in the tensor that the rank holds


def runs_of(extent: Extent, rank: int) -> list[Run]:
    """Return the rows that `rank` holds, in the order in which it holds them."""
    if isinstance(extent, Even | Padded | Ragged):
        return _joined([(extent.offset(rank), extent.local_size(rank))])
    if isinstance(extent, ZigZag):
        return _joined([(start, extent.run) for start in extent.starts(rank)])
    if isinstance(extent, Folded):
        inner, size = runs_of(extent.inner, rank), extent.inner.total
        blocks = range(extent.outer)
        return _joined(
            [(block * size + first, n) for block in blocks for first, n in inner]
        )
    return _joined([(row, 1) for row in extent.rows(rank)])


def global_shape(found: TensorType, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the global value, with a leading dim for each Varying axis."""
    return (*_varying(found).values(), *found.global_shape(tuple(shape)))


def boxes_of(
    found: TensorType, shape: Sequence[int], part: Sequence[Run] | None = None
) -> list[Box]:
    """Return what this rank holds of a global tensor; a piece without elements has none.

    `shape` is that of the piece that the type gives this rank. If the rank holds only a
    part of that piece, because FSDP2 cuts it once more, `part` says which rows of each dim.
    """
    place = found.mesh.place
    dims: list[list[Run]] = [[(place[axis], 1)] for axis in _varying(found)]
    for dim, size in enumerate(shape):
        runs: list[Run] = [(0, found.global_size(dim, size))]
        for axis, extent in found.cuts(dim):
            runs = [run for cut in runs_of(extent, place[axis]) for run in _cut(runs, *cut)]
        if part is not None:
            runs = _cut(runs, *part[dim])
        dims.append(_joined(runs))
    placed = [_placed(runs) for runs in dims]
    return [
        Box(
            tuple(first for first, _, _ in chosen),
            tuple(n for _, n, _ in chosen),
            tuple(at for _, _, at in chosen),
        )
        for chosen in product(*placed)
    ]


def _varying(found: TensorType) -> dict[str, int]:
    """Axes where ranks hold unrelated values, which are stacked; with their sizes."""
    mesh = found.mesh
    return {axis: mesh.sizes[axis] for axis in mesh.axes if found[axis].letter == "V"}


def _cut(runs: Sequence[Run], start: int, size: int) -> list[Run]:
    """Return `size` rows from row `start` on, of a dim whose rows are these runs."""
    found: list[Run] = []
    end = start + size
    for first, rows in runs:
        low, high = max(start, 0), min(end, rows)
        if low < high:
            found.append((first + low, high - low))
        start, end = start - rows, end - rows
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Return the same rows with runs that follow each other made one, none empty."""
    found: list[Run] = []
    for first, rows in runs:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + rows)
        elif rows:
            found.append((first, rows))
    return found


def _placed(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Add to each run where it begins in the tensor that holds them one after another."""
    found: list[tuple[int, int, int]] = []
    at = 0
    for first, rows in runs:
        found.append((first, rows, at))
        at += rows
    return found
