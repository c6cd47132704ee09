"""Collectives and casts: `f(x, axis, src=..., dst=...)`, typed on one mesh axis.

Names and arguments are those of `spmd_types`. What each does, forward and backward, is
the table in `transitions.py`. A call over an axis of size 1 sends nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from placements import tags
from placements.callsite import name_of
from placements.describe import described, operand_of
from placements.errors import PlacementError, mismatch
from placements.extents import Even, Extent, Padded
from placements.infer import Operand, Refusal
from placements.ledger import active_ledger
from placements.mesh import Mesh, current_mesh
from placements.moves import Cut, Move, apply
from placements.retype import retyped, shifted
from placements.state import current, observer, suspended
from placements.tensor_type import TensorType, make
from placements.torch_private import unseen
from placements.transitions import Transition, choices, find
from placements.transport import Line
from placements.types import WORDS, AxisType, AxisTypeLike, P, Shard, V, as_axis_type

Axis = str | dist.ProcessGroup


def all_reduce(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = P,
    dst: AxisTypeLike | None = None,
    *,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial -> Replicate | Invariant. The sum over the ranks of `axis`.

    Backward: all-reduce for Replicate, nothing for Invariant.
    Communicates: all-reduce over `axis`.
    """
    return _cast_around(_transition, "all_reduce", x, axis, src, dst, op_dtype, out_dtype)


def all_gather(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = V,
    dst: AxisTypeLike | None = None,
    *,
    gather_dim: int | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Shard | Varying -> Replicate | Invariant. All pieces joined, or values stacked.

    Pieces of unequal length need their extent: `src=S(1, Padded(5))`. Varying values are
    stacked on a new dim, `gather_dim` (0).
    Backward: reduce-scatter for Replicate, this rank's piece for Invariant.
    Communicates: all-gather over `axis`.
    """
    new_dim = _one_dim("gather_dim", gather_dim, as_axis_type(src))
    return _cast_around(
        _transition,
        "all_gather",
        x,
        axis,
        src,
        dst,
        op_dtype,
        out_dtype,
        new_dim=new_dim,
    )


def reduce_scatter(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = P,
    dst: AxisTypeLike = V,
    *,
    scatter_dim: int | None = None,
    op_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Partial -> Shard | Varying. This rank's piece (or row) of the sum.

    A Shard without an extent is cut like `torch.chunk`: 5 rows over 2 ranks are 3 and 2.
    Backward: all-gather. Communicates: reduce-scatter over `axis`.
    """
    new_dim = _one_dim("scatter_dim", scatter_dim, as_axis_type(dst))
    return _cast_around(
        _transition, "reduce_scatter", x, axis, src, dst, op_dtype, out_dtype,
        new_dim=new_dim,
    )  # fmt: skip


def all_to_all(
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike = V,
    dst: AxisTypeLike = V,
    *,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Varying -> Varying, rows change ranks; or Shard(i) -> Shard(j), another cut.

    Varying: `input_split_sizes[q]` rows of dim 0 go to rank q and
    `output_split_sizes[q]` come from it; without sizes, equal runs.
    Backward: the same with the sizes exchanged. Communicates: all-to-all over `axis`.
    """
    return _transition(
        "all_to_all", x, axis, src, dst,
        sends=input_split_sizes, receives=output_split_sizes,
    )  # fmt: skip


def redistribute(x: Tensor, axis: Axis, src: AxisTypeLike, dst: AxisTypeLike) -> Tensor:
    """Any type -> any type of the same value, by the one call that does it."""
    return _transition("redistribute", x, axis, src, dst)


def convert(x: Tensor, axis: Axis, src: AxisTypeLike, dst: AxisTypeLike) -> Tensor:
    """The same value under another type, without communication forward.

    `convert(x, "tp", src=I, dst=R)` is where a replicated value is put to different use
    on each rank: its backward is the all-reduce of the gradient.
    """
    return _transition("convert", x, axis, src, dst)


def reinterpret(x: Tensor, axis: Axis, src: AxisTypeLike, dst: AxisTypeLike) -> Tensor:
    """The same local data under another meaning; nothing moves, forward or backward."""
    return _transition("reinterpret", x, axis, src, dst)


def _cast_around(
    transition: Any,
    call: str,
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike | None,
    op_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    **options: Any,
) -> Tensor:
    """Run a collective in `op_dtype`; the result has `out_dtype` (else `op_dtype`)."""
    x = x if op_dtype is None else x.to(op_dtype)
    result = transition(call, x, axis, src, dst, **options)
    return result if out_dtype is None else result.to(out_dtype)


def _one_dim(argument: str, dim: int | None, t: AxisType) -> int:
    if isinstance(t, Shard):
        if dim is not None and dim != t.dim:
            raise ValueError(f"{argument}={dim}, but {t!r} names dim {t.dim}")
        return 0
    return dim or 0


def _transition(
    call: str,
    x: Tensor,
    axis: Axis,
    src_like: AxisTypeLike,
    dst_like: AxisTypeLike | None,
    *,
    new_dim: int = 0,
    sends: Sequence[int] | None = None,
    receives: Sequence[int] | None = None,
) -> Tensor:
    src, dst = as_axis_type(src_like), _required(call, dst_like)
    line, mesh = _line(axis)
    same = call in ("redistribute", "convert", "reinterpret") and repr(src) == repr(dst)
    row = None if same else find(call, src, dst)
    if row is None and not same:
        raise _no_such_transition(call, x, line.axis, src, dst)
    if row is not None and row.action == "recut" and _dim(src, x) == _dim(dst, x):
        raise _no_such_transition(call, x, line.axis, src, dst)
    if current.mode is None:
        if row is None or (line.size == 1 and row.action not in _RESHAPES):
            return x
        return apply(_untyped_move(row, x, line, src, dst, new_dim, sends, receives), x)
    watcher = observer()
    if watcher is not None:
        watcher.crossing(call, None, x, tags.get(x))
    with unseen(), suspended():
        moved = _checked(call, row, x, line, mesh, src, dst, new_dim, sends, receives)
    if watcher is not None and moved is not x:
        watcher.crossing(call, "result", moved, tags.get(moved))
    return moved


# Actions that add or take away a dim do so on one rank too.
_RESHAPES = ("stack", "unbind", "sum and unbind", "place row", "exchange")


def _dim(t: AxisType, x: Tensor) -> int | None:
    return t.dim % x.dim() if isinstance(t, Shard) else None


def _required(call: str, dst: AxisTypeLike | None) -> AxisType:
    if dst is None:
        raise ValueError(
            f"{call} needs dst=R or dst=I: the backward depends on it. R if each rank "
            "uses the result in its own way, I if all repeat one computation"
        )
    return as_axis_type(dst)


def _line(axis: Axis) -> tuple[Line, Mesh | None]:
    mesh = current_mesh()
    if isinstance(axis, str):
        if mesh is None:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                raise ValueError(
                    f"axis {axis!r} is a name, but no mesh is current; "
                    "with set_current_mesh(mesh): ..."
                )
            return Line(axis, 1, 0, None), None
        size = mesh.require(axis)
        return Line(axis, size, mesh.coordinate[axis], mesh.group(axis)), mesh
    for name in mesh.sizes if mesh is not None and mesh.device_mesh is not None else ():
        assert mesh is not None
        if mesh.group(name) is axis:
            return Line(name, mesh.sizes[name], mesh.coordinate[name], axis), mesh
    rank = dist.get_rank(axis)
    return Line(axis.group_name, dist.get_world_size(axis), rank, axis), None


def _untyped_move(
    row: Transition,
    x: Tensor,
    line: Line,
    src: AxisType,
    dst: AxisType,
    new_dim: int,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
) -> Move:
    """The move as the arguments alone describe it: checking is off."""
    src_cut = _held_cut(src, x, line) if isinstance(src, Shard) else None
    dst_cut: Cut | None = None
    if isinstance(dst, Shard):
        dim = dst.dim % x.dim()
        rows = x.shape[dim]
        if row.action in ("cut", "sum and cut", "recut"):
            extent: Extent = (dst.extent or Padded(rows)).over(line.size)
            if extent.total != rows:
                raise ValueError(
                    f"{row.call}: {extent!r} cuts {extent.total} rows, but dim {dim} "
                    f"has {rows}"
                )
            dst_cut = dim, extent
        else:
            dst_cut = _held_cut(dst, x, line)
    sent, received = _splits(row, x.shape, line, sends, receives)
    return Move(row, line, src_cut, dst_cut, new_dim, sent, received, active_ledger())


def _held_cut(t: Shard, x: Tensor, line: Line) -> Cut:
    dim = t.dim % x.dim()
    extent = (t.extent or Even(x.shape[dim] * line.size)).over(line.size)
    if extent.local_size(line.rank) != x.shape[dim]:
        raise ValueError(
            f"dim {dim} has {x.shape[dim]} rows here, but {extent!r} over axis "
            f"{line.axis!r} gives rank {line.rank} {extent.local_size(line.rank)}"
        )
    return dim, extent


def _splits(
    row: Transition,
    shape: Sequence[int],
    line: Line,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if row.action != "exchange":
        if sends is not None or receives is not None:
            raise ValueError("split sizes go with src=V, dst=V: rows change ranks")
        return (), ()
    if (sends is None) != (receives is None):
        raise ValueError("give both input_split_sizes and output_split_sizes, or neither")
    rows = shape[0]
    if sends is None or receives is None:
        if rows % line.size:
            raise ValueError(
                f"all_to_all without split sizes needs a multiple of {line.size} rows, "
                f"got {rows}"
            )
        even = (rows // line.size,) * line.size
        return even, even
    if len(sends) != line.size or len(receives) != line.size:
        raise ValueError(
            f"split sizes need one entry for each of the {line.size} ranks of axis "
            f"{line.axis!r}, got {len(sends)} and {len(receives)}"
        )
    if sum(sends) != rows or min(*sends, *receives) < 0:
        raise ValueError(
            f"input_split_sizes {list(sends)} must be >= 0 and sum to the {rows} rows"
        )
    return tuple(sends), tuple(receives)


def _checked(
    call: str,
    row: Transition | None,
    x: Tensor,
    line: Line,
    mesh: Mesh | None,
    src: AxisType,
    dst: AxisType,
    new_dim: int,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
) -> Tensor:
    if mesh is None and line.size > 1:
        raise PlacementError(
            f"{call}: the process group {line.axis!r} is no axis of the current mesh",
            where=call,
            advice="name an axis of the current mesh",
        )
    operand = operand_of(x, call)
    if line.axis not in operand.type.mesh.sizes and line.size > 1:
        raise mismatch(
            call, name_of(x) or "x", line.axis, f"a tensor on {mesh!r}",
            f"on {operand.type.mesh!r}",
            rule="a collective runs over an axis of the mesh that the tensor lives on",
            advice=f"reinterpret_mesh({name_of(x) or 'x'}, mesh)",
        )  # fmt: skip
    if line.size == 1:
        return _on_one_rank(row, x, operand, line, new_dim, sends, receives)
    _check_source(call, x, operand, line, src)
    if row is None:
        return x
    sent, received = _splits(row, x.shape, line, sends, receives)
    try:
        result = retyped(
            row, operand, line.axis, dst, new_dim=new_dim,
            receives=received if row.action == "exchange" else None,
        )  # fmt: skip
    except Refusal as refusal:
        raise mismatch(
            call, name_of(x) or "x", refusal.axis, refusal.expected,
            _word(operand.type[refusal.axis or line.axis]),
            rule=refusal.reason, operands=[described(x, operand.type)],
        ) from None  # fmt: skip
    move = Move(
        row, line, _cut_in(operand.type, line.axis), _cut_in(result.type, line.axis),
        new_dim, sent, received, active_ledger(),
    )  # fmt: skip
    moved = apply(move, x)
    tags.put(moved, result.type)
    return moved


def _on_one_rank(
    row: Transition | None,
    x: Tensor,
    operand: Operand,
    line: Line,
    new_dim: int,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
) -> Tensor:
    """Nothing is sent and no type changes; dims come and go as on many ranks."""
    if row is None or row.action not in _RESHAPES:
        return x
    sent, received = _splits(row, x.shape, line, sends, receives)
    moved = apply(Move(row, line, None, None, new_dim, sent, received), x)
    tags.put(moved, _with_dims_moved(operand.type, row, new_dim))
    return moved


def _with_dims_moved(t: TensorType, row: Transition, dim: int) -> TensorType:
    by = {"stack": 1, "place row": 1, "unbind": -1, "sum and unbind": -1}.get(row.action, 0)
    return make(t.mesh, shifted(dict(t), dim, by), t.index)


def _cut_in(t: TensorType, axis: str) -> Cut | None:
    shard = t[axis]
    if not isinstance(shard, Shard):
        return None
    assert shard.extent is not None
    return shard.dim, shard.extent


def _check_source(
    call: str, x: Tensor, operand: Operand, line: Line, src: AxisType
) -> None:
    actual = operand.type[line.axis]
    if isinstance(src, Shard):
        src = Shard(src.dim % x.dim(), src.extent)
    if operand.type.fresh is not None and src.letter in "RI":
        return
    if actual != src:
        raise mismatch(
            call, name_of(x) or "x", line.axis, _word(src), _word(actual),
            rule="src must be the type that the tensor has",
            operands=[described(x, operand.type)],
        )  # fmt: skip
    if isinstance(src, Shard) and isinstance(actual, Shard) and src.extent is None:
        assert actual.extent is not None
        if not actual.extent.is_even:
            raise mismatch(
                call, name_of(x) or "x", line.axis,
                f"src={actual!r}", f"cut unevenly, {actual.extent!r}, and src={src!r}",
                rule="with checking off nothing else tells the collective how many rows "
                "each rank holds",
                operands=[described(x, operand.type)],
                advice=f"src={actual!r}",
            )  # fmt: skip


def _word(t: AxisType) -> str:
    return repr(t) if isinstance(t, Shard) else WORDS[t.letter]


def _no_such_transition(
    call: str, x: Tensor, axis: str, src: AxisType, dst: AxisType
) -> PlacementError:
    name = name_of(x) or "x"
    advice = ""
    if call in ("all_reduce", "reduce_scatter") and src.letter in "VS":
        advice = (
            f"if the values really are summands, say so: "
            f"reinterpret({name}, {axis!r}, src=V, dst=P)"
        )
    elif call in ("all_reduce", "reduce_scatter") and src.letter in "RI":
        advice = "the values are equal on all ranks already; a sum would count them n times"
    elif find("redistribute", src, dst) is not None:
        other = find("redistribute", src, dst)
        assert other is not None
        advice = f"{other.call}({name}, {axis!r}, src={src!r}, dst={dst!r})"
    return PlacementError(
        f"{call}: {name} on axis {axis!r} from {_word(src)} to {_word(dst)}, expected "
        f"one of {', '.join(choices(call))}",
        where=call, name=name, axis=axis, actual=f"{src!r} -> {dst!r}",
        expected=", ".join(choices(call)),
        rule="a reduction sums values that are pending a sum, and nothing else"
        if call in ("all_reduce", "reduce_scatter") else "",
        advice=advice,
    )  # fmt: skip
