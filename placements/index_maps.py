"""`to_global` and `to_local`: change which rows an integer tensor counts.

This is the only arithmetic that keeps an index an index: which rows a rank holds is
read from the extent, never computed by hand from rank and length.
"""

from torch import Tensor

from placements import tags
from placements.callsite import name_of
from placements.describe import described, type_or_error
from placements.errors import mismatch
from placements.extents import Extent
from placements.index import Computed, Index
from placements.mesh import current_mesh
from placements.state import current
from placements.torch_private import unseen


def to_global(index: Tensor, axis: str, extent: Extent) -> Tensor:
    """Rows of this rank -> the same rows counted over all ranks of `axis`."""
    mesh = current_mesh()
    ranks = 1 if mesh is None else mesh.require(axis)
    rank = 0 if mesh is None else mesh.coordinate[axis]
    with unseen():
        rows = extent.over(ranks).to_global(index, rank)
        if ranks > 1:
            _tag_as(
                rows, index, "to_global", Index(extent.over(ranks), axis), Index(extent)
            )
    return rows


def to_local(index: Tensor, axis: str, extent: Extent) -> tuple[Tensor, Tensor]:
    """Rows counted over all ranks of `axis` -> (the rank of each, its row there)."""
    mesh = current_mesh()
    ranks = 1 if mesh is None else mesh.require(axis)
    with unseen():
        owner, rows = extent.over(ranks).to_local(index)
        if ranks > 1:
            _tag_as(rows, index, "to_local", Index(extent), Index(extent.over(ranks), axis))
            _tag_as(owner, index, "to_local", Index(extent), Index(ranks))
    return owner, rows


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
