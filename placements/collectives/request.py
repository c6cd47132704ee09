"""One transition, as called: find its row, check and type it, run it.

With checking off the arguments alone say what to do. With checking on the tensor's type
must be `src`, and the result gets its type; the rest is the same. Dims are counted from
the front from here on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from placements._torch import unseen
from placements.collectives.errors import (
    check_mesh,
    check_source,
    no_such_transition,
    refused,
)
from placements.collectives.moves import Cut, Move, apply
from placements.collectives.precision import (
    NOTHING_SAID,
    BackwardOptions,
    Dtypes,
    gradient_dtype,
    said_dtypes,
)
from placements.collectives.transport import Line
from placements.inference.retype import cast_pads, retyped, retyped_on_one_rank
from placements.inference.terms import Operand, Refusal
from placements.inference.transitions import Transition, find, unchanged
from placements.runtime import tags
from placements.runtime.callsite import caller, name_of
from placements.runtime.describe import described, operand_of
from placements.runtime.errors import PlacementError
from placements.runtime.leaf_gradients import follow_hook
from placements.runtime.ledger import active_ledger
from placements.runtime.mesh import current_mesh
from placements.runtime.reductions import Step, note_move
from placements.runtime.state import current, observer, suspended
from placements.types.axis import AxisType, AxisTypeLike, Shard
from placements.types.extents import Even, Extent, Padded
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType
from placements.types.text import as_axis_type

Axis = str | dist.ProcessGroup
# op_dtype, out_dtype, backward_options
SaidDtypes = tuple[torch.dtype | None, torch.dtype | None, BackwardOptions | None]


@dataclass(frozen=True)
class Request:
    """A call: what is to become of `x` on one axis."""

    call: str
    x: Tensor
    line: Line
    mesh: Mesh | None
    src: AxisType
    dst: AxisType
    dtypes: Dtypes
    new_dim: int
    sends: Sequence[int] | None
    receives: Sequence[int] | None


def run(
    call: str,
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike | None,
    dtypes: SaidDtypes,
    *,
    new_dim: int = 0,
    sends: Sequence[int] | None = None,
    receives: Sequence[int] | None = None,
) -> Tensor:
    """Carry out `call` on `x` over `axis`, from type `src` to type `dst`.

    `dtypes` are the call's op_dtype, out_dtype and backward_options.
    """
    chosen = said_dtypes(call, x.dtype, *dtypes)
    line, mesh = _line(call, axis)
    types = (
        _from_front(call, as_axis_type(src), x),
        _from_front(call, _required(call, dst), x),
    )
    row = _row(call, x, line.axis, *types)
    new_dim = _row_dim(call, new_dim, x, row)
    request = Request(call, x, line, mesh, *types, chosen, new_dim, sends, receives)
    if row is None and chosen != NOTHING_SAID:
        row = unchanged(types[0])
    if current.mode is None:
        if row is None:
            return x
        return _noted(request, apply(_move(request, row, *_cuts_as_said(request, row)), x))
    if row is not None and x.requires_grad and not torch.is_grad_enabled():
        _check_gradient_kept(call, x)
    watcher = observer()
    if watcher is not None:
        watcher.crossing(call, None, x, tags.get(x))
    with unseen(), suspended():
        moved = _noted(request, _checked(request, row))
    if watcher is not None and moved is not x:
        watcher.crossing(call, "result", moved, tags.get(moved))
    return moved


def _noted(request: Request, moved: Tensor) -> Tensor:
    """The result, with a note of what was done if it may be a gradient."""
    x, line = request.x, request.line
    if line.size > 1 and moved is not x:
        said = request.call, request.mesh, line.axis, request.src, request.dst
        step = note_move(x, moved, Step(*said, ""))
        if step is not None:
            follow_hook(x, step)
    return moved


def _check_gradient_kept(call: str, x: Tensor) -> None:
    """A result under no_grad is cut off from `x`; of a leaf everybody knows it."""
    if x.grad_fn is None:
        return
    name = name_of(x) or "x"
    raise PlacementError(
        f"{call} at {caller()}: {name} needs a gradient, which no_grad() drops here",
        where=f"{call} at {caller()}",
        name=name,
        rule="what is computed from the result would train without its share",
        operands=[described(x)],
        advice=f"call it outside no_grad(), or say that no gradient is meant: "
        f"{name}.detach()",
    )


def _from_front(call: str, t: AxisType, x: Tensor) -> AxisType:
    """The type with its dim counted from the front; ValueError if `x` has no such dim."""
    if not isinstance(t, Shard):
        return t
    if not -x.dim() <= t.dim < x.dim():
        raise ValueError(f"{call}: {t!r} names a dim that {x.dim()} dims do not have")
    return t if t.dim >= 0 else Shard(t.dim + x.dim(), t.extent)


def _row_dim(call: str, new_dim: int, x: Tensor, row: Transition | None) -> int:
    """Which dim a row per rank is added at, or taken from."""
    if row is None or row.dims_added == 0:
        return 0
    added = row.dims_added == 1
    dims = x.dim() + added
    if not -dims <= new_dim < dims:
        raise ValueError(
            f"{call}: dim {new_dim} is none of the {dims} dims of the "
            f"{'result' if added else 'tensor'}"
        )
    return new_dim % dims


def _required(call: str, dst: AxisTypeLike | None) -> AxisType:
    if dst is None:
        raise ValueError(
            f"{call} needs dst=R or dst=I: the backward depends on it. R if each rank "
            "uses the result in its own way, I if all repeat one computation"
        )
    return as_axis_type(dst)


def _line(call: str, axis: Axis) -> tuple[Line, Mesh | None]:
    """The ranks of an axis, by its name or its process group; and the mesh it is of."""
    mesh = current_mesh()
    if isinstance(axis, str):
        if mesh is None:
            if _on_many_ranks():
                raise ValueError(
                    f"axis {axis!r} is a name, but no mesh is current; "
                    "with set_current_mesh(mesh): ..."
                )
            return Line(axis, 1, 0, None), None
        size = mesh.require(axis)
        unsent = size > 1 and mesh.device_mesh is None and current.mode is None
        if unsent and _on_many_ranks():
            raise ValueError(
                f"{mesh!r} is sizes alone, so nothing can be sent over {axis!r}; "
                "set_current_mesh takes the DeviceMesh of these ranks"
            )
        return Line(axis, size, mesh.coordinate[axis], mesh.group(axis)), mesh
    for name in mesh.sizes if mesh is not None and mesh.device_mesh is not None else ():
        assert mesh is not None
        if mesh.group(name) is axis:
            return Line(name, mesh.sizes[name], mesh.coordinate[name], axis), mesh
    rank = dist.get_rank(axis)
    if rank < 0:
        raise ValueError(f"{call}: this rank is not one of the ranks of the process group")
    return Line(axis.group_name, dist.get_world_size(axis), rank, axis), None


def _on_many_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _row(
    call: str, x: Tensor, axis: str, src: AxisType, dst: AxisType
) -> Transition | None:
    """The row of the table; None where src and dst are the same."""
    of_one_dim = isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim
    # Without an extent dst asks for pieces of a dim, however they are cut: where another
    # axis cuts the dim too, extents differ by rank, but all ranks must say the same.
    cut_as_it_is = of_one_dim and isinstance(dst, Shard) and dst.extent is None
    keeps = call in ("redistribute", "convert", "reinterpret")
    if keeps and (cut_as_it_is or repr(src) == repr(dst)):
        return None
    row = find(call, src, dst)
    if row is None or of_one_dim:
        raise no_such_transition(call, x, axis, src, dst)
    return row


def _move(
    request: Request, row: Transition, src_cut: Cut | None, dst_cut: Cut | None
) -> Move:
    line, splits = request.line, _splits(request, row)
    return Move(
        row,
        line,
        src_cut,
        dst_cut,
        request.new_dim,
        *splits,
        dtypes=request.dtypes,
        gradient_dtype=gradient_dtype(line.axis) if line.size > 1 else None,
        record=active_ledger() if line.size > 1 else None,
    )


def _cuts_as_said(request: Request, row: Transition) -> tuple[Cut | None, Cut | None]:
    """The cuts that the arguments alone describe: checking is off."""
    src, dst, x, line = request.src, request.dst, request.x, request.line
    if row.dims_added == -1 and x.shape[request.new_dim] != line.size:
        raise ValueError(
            f"{row.call}: one row per rank is taken from dim {request.new_dim}, so it must "
            f"have {line.size} rows, got {x.shape[request.new_dim]}; for pieces of several "
            "rows use Shard"
        )
    if line.size == 1:
        return None, None  # the one piece is the whole, however it is said to be cut
    src_cut = _held_cut(src, x, line) if isinstance(src, Shard) else None
    if not isinstance(dst, Shard):
        return src_cut, None
    if row.action not in ("cut", "sum and cut", "recut"):
        return src_cut, _held_cut(dst, x, line)
    dim = dst.dim
    extent: Extent = (dst.extent or Padded(x.shape[dim])).over(line.size)
    if extent.total != x.shape[dim]:
        raise ValueError(
            f"{row.call}: {extent!r} cuts {extent.total} rows, but dim {dim} has "
            f"{x.shape[dim]}"
        )
    return src_cut, (dim, extent)


def _held_cut(t: Shard, x: Tensor, line: Line) -> Cut:
    dim = t.dim
    extent = (t.extent or Even(x.shape[dim] * line.size)).over(line.size)
    if extent.local_size(line.rank) != x.shape[dim]:
        raise ValueError(
            f"dim {dim} has {x.shape[dim]} rows here, but {extent!r} over axis "
            f"{line.axis!r} gives rank {line.rank} {extent.local_size(line.rank)}"
        )
    return dim, extent


def _splits(request: Request, row: Transition) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How many rows go to each rank, and come from it; equal runs unless it is said."""
    sends, receives, line = request.sends, request.receives, request.line
    if row.action != "exchange":
        if sends is not None or receives is not None:
            raise ValueError("split sizes go with src=V, dst=V: rows change ranks")
        return (), ()
    if (sends is None) != (receives is None):
        raise ValueError("give both input_split_sizes and output_split_sizes, or neither")
    if request.x.dim() == 0:
        raise ValueError("all_to_all exchanges the rows of dim 0, but the tensor has none")
    rows = request.x.shape[0]
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
    if line.size == 1 and sends[0] != receives[0]:
        raise ValueError(
            f"the only rank of axis {line.axis!r} sends itself {sends[0]} rows, but "
            f"output_split_sizes says that {receives[0]} come"
        )
    return tuple(sends), tuple(receives)


def _checked(request: Request, row: Transition | None) -> Tensor:
    x, line = request.x, request.line
    operand = operand_of(x, request.call)
    if line.size > 1:
        check_mesh(request.call, x, operand.type, line.axis, request.mesh)
        check_source(request.call, x, operand.type, line.axis, request.src, request.dst)
    if row is None:
        return x
    try:
        move, found = _typed_move(request, row, operand)
    except Refusal as refusal:
        raise refused(request.call, x, operand.type, line.axis, refusal) from None
    moved = apply(move, x)
    if request.dtypes.op or request.dtypes.out:
        found = found.with_pads(cast_pads(found.pads))
    tags.put(moved, found)
    return moved


def _typed_move(
    request: Request, row: Transition, operand: Operand
) -> tuple[Move, TensorType]:
    """The move, cut as the types say, and the type of what it gives."""
    axis = request.line.axis
    if row.src == row.dst and row.action == "same":
        return _move(request, row, None, None), operand.type
    if request.line.size == 1:
        found = retyped_on_one_rank(row, operand, axis, request.new_dim)
        return _move(request, row, None, None), found
    move = _move(request, row, _cut_in(operand, axis), None)
    result = retyped(
        row, operand, axis, request.dst, new_dim=request.new_dim,
        receives=move.receives if row.action == "exchange" else None,
    )  # fmt: skip
    return replace(move, dst_cut=_cut_in(result, axis)), result.type


def _cut_in(operand: Operand, axis: str) -> Cut | None:
    shard = operand.type[axis]
    if not isinstance(shard, Shard):
        return None
    assert shard.extent is not None
    return shard.dim, shard.extent
