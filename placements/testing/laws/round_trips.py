"""There and back again: print and parse, split and join, local rows and global rows."""

import torch

from placements.testing.draw.placed import join_ranks
from placements.testing.strategies import PlacedTensor
from placements.types.axis import AxisType
from placements.types.extents import Extent
from placements.types.meaning import put_pieces, take_piece
from placements.types.text import parse_axis_type


def check_printed(t: AxisType) -> None:
    """Check that a type reads as it prints."""
    text = repr(t)
    assert parse_axis_type(text) == t and repr(parse_axis_type(text)) == text, text


def check_rows(extent: Extent) -> None:
    """Check that every global row lies on one rank, and both directions are inverse."""
    seen: list[int] = []
    whole = torch.arange(extent.total)
    pieces = [take_piece(whole, 0, extent, rank) for rank in range(extent.bound_ranks)]
    assert torch.equal(put_pieces(pieces, 0, extent), whole), extent
    for rank in range(extent.bound_ranks):
        rows = extent.rows(rank)
        assert len(rows) == extent.local_size(rank), (extent, rank)
        assert not rows or extent.offset(rank) == rows[0], (extent, rank)
        assert torch.equal(pieces[rank], whole[rows]), (extent, rank)
        seen += rows
        here = torch.arange(extent.local_size(rank))
        assert extent.to_global(here, rank).tolist() == rows, (extent, rank)
        for place, row in enumerate(rows):
            assert extent.to_local(row) == (rank, place), (extent, row)
        if rows:
            owners, places = extent.to_local(torch.tensor(rows))
            assert set(owners.tolist()) == {rank}, (extent, rank)
            assert places.tolist() == list(range(len(rows))), (extent, rank)
    assert sorted(seen) == list(range(extent.total)), extent


def check_scaled(extent: Extent, factor: int) -> None:
    """Check that `divided` undoes `scaled`, which keeps every rank's rows together."""
    scaled = extent.scaled(factor)
    assert scaled.divided(factor) == extent, (extent, factor)
    part = extent.divided(factor)
    assert part is None or part.scaled(factor) == extent, (extent, factor)
    for rank in range(extent.bound_ranks):
        rows = [row * factor + k for row in extent.rows(rank) for k in range(factor)]
        assert scaled.rows(rank) == rows, (extent, factor, rank)


def check_joined(placed: PlacedTensor) -> None:
    """Check that what the ranks hold joins to one value, of the global shape."""
    varying = [axis for axis, t in placed.types[0].items() if t.letter == "V"]
    inner = [
        axis for dim in range(len(placed.shape)) for axis in placed.types[0].order(dim)
    ]
    apart = varying if not inner else [a for a in varying if a not in inner]
    for value in join_ranks(placed.locals, placed.types, placed.mesh, apart).values():
        assert tuple(value.shape) == placed.shape, placed
