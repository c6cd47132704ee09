"""Make an index of rows, or change whose rows an index counts.

This is the only arithmetic that keeps an index an index: which rows a rank holds is
read from the extent, never computed by hand from rank and length.
"""

import torch
from torch import Tensor

from placements._torch import unseen
from placements.runtime import tags
from placements.runtime.callsite import name_of
from placements.runtime.describe import described
from placements.runtime.errors import mismatch, type_or_error
from placements.runtime.mesh import current_mesh
from placements.runtime.state import current
from placements.types.axis import AxisType, R, Shard, V
from placements.types.extents import Extent
from placements.types.index import Computed, Index
from placements.types.padding import Pads
from placements.types.tensor import TensorType, make


def row_numbers(x: Tensor, dim: int) -> Tensor:
    """Any tensor -> the numbers of its rows along `dim`, an index of just those rows.

    Where `dim` is cut they count this rank's own rows and are cut as `dim` is.
    """
    with unseen():
        rows = torch.arange(x.shape[dim], device=x.device)
        if current.mode is not None:
            known = type_or_error(x, "row_numbers")
            tags.put(rows, _numbers_type(known, dim % x.dim(), x.shape[dim]))
    other = current.other
    return rows if other is None else other.numbered(rows, x, frozenset())


def _numbers_type(known: TensorType, dim: int, size: int) -> TensorType:
    cuts = known.cuts(dim)
    types: dict[str, AxisType] = {axis: Shard(0, extent) for axis, extent in cuts}
    for axis, t in known.items():
        types.setdefault(axis, V if t == V else R)
    counted = make(known.mesh, types, Index.of_cuts(cuts) if cuts else Index(size))
    return counted.with_pads(
        tuple(Pads(p.validity, (0,)) for p in known.pads if p.dims == (dim,))
    )


def to_global(index: Tensor, axis: str, extent: Extent) -> Tensor:
    """Rows of this rank -> the same rows counted over all ranks of `axis`."""
    mesh = current_mesh()
    ranks = 1 if mesh is None else mesh.require(axis)
    rank = 0 if mesh is None else mesh.place[axis]
    with unseen():
        rows = extent.over(ranks).to_global(index, rank)
        if ranks > 1:
            counts = Index(extent.over(ranks), axis)
            known = (
                type_or_error(index, "to_global").index
                if current.mode is not None
                else None
            )
            becomes = Index(extent)
            if isinstance(known, Index) and known.cuts[-1:] == counts.cuts:
                # Rows cut over outer axes too: they are still this rank's rows of those.
                counts = known
                becomes = Index.of_cuts(known.cuts[:-1]) if known.cuts[1:] else becomes
            _tag_as(rows, index, "to_global", counts, becomes)
        else:
            _tag_like(rows, index)
    other = current.other
    return rows if other is None else other.numbered(rows, index, frozenset({axis}))


def to_local(index: Tensor, axis: str, extent: Extent) -> tuple[Tensor, Tensor]:
    """Rows counted over all ranks of `axis` -> (the rank of each, its row there)."""
    mesh = current_mesh()
    ranks = 1 if mesh is None else mesh.require(axis)
    with unseen():
        owner, rows = extent.over(ranks).to_local(index)
        if ranks > 1:
            _tag_as(rows, index, "to_local", Index(extent), Index(extent.over(ranks), axis))
            _tag_as(owner, index, "to_local", Index(extent), Index(ranks))
        else:
            _tag_like(rows, index)
            _tag_like(owner, index, Index(1))
    other = current.other
    if other is None:
        return owner, rows
    none = frozenset[str]()
    return other.numbered(owner, index, none), other.numbered(rows, index, none)


def _tag_like(result: Tensor, index: Tensor, becomes: Index | None = None) -> None:
    """Give the result the type of the index: an axis of size 1 changes nothing."""
    if current.mode is None:
        return
    known = tags.get(index)
    if known is not None:
        tags.put(result, known.with_index(becomes or known.index))


def _tag_as(
    result: Tensor, index: Tensor, call: str, counts: Index, becomes: Index
) -> None:
    if current.mode is None:
        return
    known = type_or_error(index, call)
    if known.index not in (None, counts):
        said = (
            "computed by arithmetic" if isinstance(known.index, Computed) else known.index
        )
        raise mismatch(
            call, name_of(index) or "index", None, repr(counts), f"an index ({said!r})",
            rule="the index must count the rows that are converted",
            operands=[described(index, known)],
        )  # fmt: skip
    tags.put(result, known.with_index(becomes))
