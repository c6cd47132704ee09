"""Pure: the type and shape that a transition gives a tensor on one axis."""

from collections.abc import Sequence
from dataclasses import replace

from placements.inference.padding import NO_PADS, cast, padding_refusal
from placements.inference.terms import Operand, Refusal
from placements.inference.transitions import Transition
from placements.types.axis import AxisType, Shard
from placements.types.extents import Extent, Padded
from placements.types.index import COMPUTED, Computed, Index
from placements.types.padding import Pads
from placements.types.tensor import TensorType, make

INNER_FIRST = (
    "another axis cuts this dim further in, so these pieces are not next to each other; "
    "undo the inner cut first"
)


OUTER_FIRST = (
    "another axis cuts this dim further out, and its pieces are made of these; forget the "
    "outer cut first"
)


def retyped(
    row: Transition,
    x: Operand,
    axis: str,
    dst: AxisType,
    *,
    new_dim: int = 0,
    receives: Sequence[int] | None = None,
) -> Operand:
    """`x` after the transition `row` on `axis`.

    `new_dim`: where a stack puts its dim, or which dim an unbind takes away.
    """
    mesh, rank = x.type.mesh, x.type.mesh.place[axis]
    shape = list(x.shape)
    pads = moved_pads(row, x, axis, new_dim)
    types = x.type if x.type.orders else x.type.by_axis  # cuts of one dim keep their order
    others: dict[str, AxisType] = {a: t for a, t in types.items() if a != axis}
    src = x.type.by_axis[axis]
    match row.action:
        case "gather" | "place" | "recut":
            dim, extent = _cut_of(x, axis, src)
            shape[dim] = extent.total
        case "stack" | "place row":
            shape.insert(new_dim, mesh.sizes[axis])
            others = shifted(others, new_dim, 1)
        case "unbind" | "sum and unbind":
            _must_be_whole(x, axis, new_dim, mesh.sizes[axis])
            del shape[new_dim]
            others = shifted(others, new_dim, -1)
        case "exchange":
            for other, t in others.items():
                if isinstance(t, Shard) and t.dim == 0:
                    raise Refusal(
                        "the rows that are exchanged are pieces on another axis, and "
                        "would be theirs no longer",
                        other, x, "Varying",
                    )  # fmt: skip
            shape[0] = sum(receives) if receives is not None else shape[0]
        case "same" if isinstance(src, Shard) and x.type.order(src.dim)[0] != axis:
            raise Refusal(OUTER_FIRST, axis, x, "the outermost cut of the dim")
        case _:
            pass
    if row.action in ("cut", "sum and cut", "recut"):
        assert isinstance(dst, Shard)
        dst = _bound(dst, shape[dst.dim], mesh.sizes[axis], x, axis)
        assert dst.extent is not None
        shape[dst.dim] = dst.extent.local_size(rank)
    elif isinstance(dst, Shard):
        dst = _claimed(dst, shape, mesh.sizes[axis], rank, x, axis)
        # What is joined along the inner cuts is a piece of the new one.
        others = {axis: dst, **others}
    new_type = make(mesh, {**others, axis: dst}, _index_after(row, x, axis))
    return replace(x, type=new_type.with_pads(pads), shape=tuple(shape))


def retyped_on_one_rank(row: Transition, x: Operand, axis: str, new_dim: int) -> TensorType:
    """Return the type of `x` after a transition over one rank: only dims change."""
    if row.dims_added == 0 and row.action != "exchange":
        return x.type
    pads = moved_pads(row, x, axis, new_dim)
    if row.dims_added == -1:
        _must_be_whole(x, axis, new_dim, 1)
    types = shifted(dict(x.type), new_dim, row.dims_added)
    return make(x.type.mesh, types, x.type.index).with_pads(pads)


def _cut_of(x: Operand, axis: str, src: AxisType) -> tuple[int, Extent]:
    assert isinstance(src, Shard) and src.extent is not None
    if x.type.order(src.dim)[-1] != axis:
        raise Refusal(INNER_FIRST, axis, x, "the innermost cut of the dim")
    return src.dim, src.extent


def _bound(dst: Shard, rows: int, ranks: int, x: Operand, axis: str) -> Shard:
    """Return the cut to make of a dim of `rows` rows, by default like torch.chunk."""
    extent = (dst.extent or Padded(rows)).over(ranks)
    if extent.total != rows:
        raise Refusal(
            f"{extent!r} cuts {extent.total} rows, but the dim has {rows}", axis, x,
            repr(Padded(rows)),
        )  # fmt: skip
    return Shard(dst.dim, extent)


def _claimed(
    dst: Shard, shape: Sequence[int], ranks: int, rank: int, x: Operand, axis: str
) -> Shard:
    """Return a cut that is claimed of rows already held, outside the cuts of the dim."""
    dim = dst.dim
    rows = x.type.global_size(dim, shape[dim])
    extent = (dst.extent or Padded(rows * ranks)).over(ranks)
    if extent.local_size(rank) != rows:
        raise Refusal(
            f"{extent!r} gives rank {rank} {extent.local_size(rank)} rows, but the dim "
            f"has {rows}",
            axis, x, repr(extent),
        )  # fmt: skip
    return Shard(dim, extent)


def _must_be_whole(x: Operand, axis: str, dim: int, ranks: int) -> None:
    if not x.shape or x.shape[dim] != ranks or x.type.order(dim):
        raise Refusal(
            f"one row per rank is taken from dim {dim}, so it must have {ranks} rows and "
            "not be cut; for pieces of several rows use Shard",
            axis, x, f"a dim of {ranks} rows",
        )  # fmt: skip


def shifted(types: dict[str, AxisType], dim: int, by: int) -> dict[str, AxisType]:
    return {
        axis: Shard(t.dim + by, t.extent) if isinstance(t, Shard) and t.dim >= dim else t
        for axis, t in types.items()
    }


OWN_ROWS = (
    "numbers of each rank's own rows count nothing on another rank: to_global(index, axis, "
    "extent) counts the rows of all ranks"
)


def _index_after(row: Transition, x: Operand, axis: str) -> Index | Computed | None:
    """Return the index after a move: a rank's own rows count nothing on another rank."""
    index = x.type.index
    if not isinstance(index, Index) or not row.communicates:
        return index
    if axis not in {own for own, _ in index.cuts}:
        return index
    if row.src == "S":
        raise Refusal(OWN_ROWS, axis, x, "an index of the rows of all ranks")
    return COMPUTED


SENT = "rows of padding would be sent like the others, and their mask would stay here"
STACKED = "each rank has rows of padding of its own, so no one mask fits their stack"
TAKEN = "one row per rank is taken from a dim that has rows of padding"


def moved_pads(row: Transition, x: Operand, axis: str, new_dim: int) -> tuple[Pads, ...]:
    """Return the padding of `x` after the transition; Refusal if its mask is lost."""
    return tuple(_moved(row, x, axis, new_dim, pads) for pads in x.type.pads)


def _moved(row: Transition, x: Operand, axis: str, new_dim: int, pads: Pads) -> Pads:
    match row.action:
        case "exchange" if 0 in pads.dims:
            raise padding_refusal(SENT, x, pads, NO_PADS)
        case "stack" | "place row":
            raise padding_refusal(STACKED, x, pads, NO_PADS)
        case "unbind" | "sum and unbind":
            if new_dim in pads.dims:
                raise padding_refusal(TAKEN, x, pads, NO_PADS)
            return replace(pads, dims=tuple(d - (d > new_dim) for d in pads.dims))
        case _:
            pass
    held = x.type.get(axis)
    pads = replace(pads, holds=0 if pads.holds == 0 else _unless_summed(row, pads.holds))
    if row.dst == "V" and isinstance(held, Shard) and held.dim in pads.dims:
        # Nothing else says which rows these are, once they are no piece.
        return replace(pads, validity=pads.validity.piece(axis, held.extent))
    return pads


def cast_pads(pads: tuple[Pads, ...]) -> tuple[Pads, ...]:
    """Return the rows of padding of a tensor that takes another dtype."""
    return tuple(replace(one, holds=cast([one.holds])) for one in pads)


def _unless_summed(row: Transition, holds: int | None) -> int | None:
    """Return what rows of padding hold; nothing is known if the ranks' rows are summed."""
    return None if "P" in (row.src, row.dst) else holds
