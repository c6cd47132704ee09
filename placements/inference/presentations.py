"""A type on another mesh over the same ranks.

Both meshes list the same ranks in the same order and only name the axes differently, as
a dense mesh (dp, cp, tp) and a sparse one (edp, ep, etp) do.
"""

from placements.inference.terms import Refusal
from placements.types.axis import AxisType, Shard
from placements.types.extents import Even, Extent, Folded, Ragged, ZigZag
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make

MIXED = (
    "these axes become one, on which the tensor would have to be two things at once; "
    "reinterpret both to Varying first if each rank's values are its own"
)


NOT_NESTED = (
    "pieces that are cut unevenly or in blocks cannot be said over these axes; "
    "reinterpret to Varying first"
)


def presented(known: TensorType, target: Mesh) -> TensorType:
    """Return the type on `target` that says what `known` says."""
    source = known.mesh
    if source == target:
        return known
    if source.rank_order() != target.rank_order():
        raise Refusal("the two meshes are not over the same ranks in the same order")
    types: dict[str, AxisType] = {}
    matching = matching_axes(source, target)
    for old, new in matching:
        types.update(_block_types(known, old, target, new))
    order: list[str] = []  # the cuts of one dim nest as they did
    for axis in known:
        order += [
            a for old, new in matching_axes(source, target) if axis in old for a in new
        ]
    by_size = sorted(types, key=lambda axis: list(target.sizes).index(axis))
    every = dict.fromkeys([*order, *by_size])
    found = make(
        target, {axis: types[axis] for axis in every if axis in types}, known.index
    )
    return found.with_pads(known.pads)


def matching_axes(a: Mesh, b: Mesh) -> list[tuple[list[str], list[str]]]:
    """Return the smallest groups of axes of both meshes that cover the same ranks."""
    ends = [set(_strides(mesh)) for mesh in (a, b)]
    found: list[tuple[list[str], list[str]]] = []
    start = 1
    for end in sorted(ends[0] & ends[1]):
        found.append((_within(a, start, end), _within(b, start, end)))
        start = end
    return found


def _strides(mesh: Mesh) -> list[int]:
    """Return how many ranks the axes up to each one make."""
    strides: list[int] = []
    for size in mesh.sizes.values():
        strides.append(size * (strides[-1] if strides else 1))
    return strides


def _within(mesh: Mesh, start: int, end: int) -> list[str]:
    """Return the axes of size > 1 whose ranks lie between two common strides."""
    places = zip(mesh.sizes, _strides(mesh), strict=True)
    return [axis for axis, at in places if mesh.sizes[axis] > 1 and start < at <= end]


def _block_types(
    known: TensorType, old: list[str], target: Mesh, new: list[str]
) -> dict[str, AxisType]:
    letters = {known[axis].letter for axis in old}
    if len(letters) > 1:
        raise Refusal(MIXED, old[0])
    if letters != {"S"}:
        return {axis: known[old[0]] for axis in new}
    if len(old) == len(new) == 1:
        return {new[0]: known[old[0]]}
    dim, whole = _merged(known, old)
    return _nested(dim, whole, target, new)


def _merged(known: TensorType, axes: list[str]) -> tuple[int, Extent]:
    """Return the one cut that nested cuts over `axes` are."""
    shards = [known[axis] for axis in axes]
    first = shards[0]
    assert isinstance(first, Shard)
    order = [axis for axis in known.order(first.dim) if axis in axes]
    if order != axes:
        raise Refusal(MIXED, axes[0])
    sizes: tuple[int, ...] = (1,)
    for shard in shards:
        assert isinstance(shard, Shard) and shard.extent is not None
        if isinstance(shard.extent, Folded | ZigZag) or len(set(sizes)) > 1:
            raise Refusal(NOT_NESTED, axes[0])
        sizes = shard.extent.sizes * len(sizes)
    return first.dim, Ragged(*sizes).canonical()


def _nested(dim: int, whole: Extent, target: Mesh, axes: list[str]) -> dict[str, AxisType]:
    if len(axes) == 1:
        return {axes[0]: Shard(dim, whole)}
    if not whole.is_even:
        raise Refusal(NOT_NESTED, axes[0])
    types: dict[str, AxisType] = {}
    rows = whole.total
    for axis in axes:
        types[axis] = Shard(dim, Even(rows, target.sizes[axis]))
        rows //= target.sizes[axis]
    return types
