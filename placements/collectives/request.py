"""One collective or cast, as it was called: read the call, check and type it, run it.

With checking off the arguments alone say what to do. With checking on the tensor's type
must be `src`, and the result gets its type; the rest is the same. Dims are counted from
the front from here on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from placements._torch import on_many_ranks, unseen
from placements.collectives.cuts import cuts_as_said
from placements.collectives.errors import (
    extent_left_out,
    gradient_dropped,
    no_axis_of_mesh,
    no_such_transition,
    on_another_mesh,
    untypable,
    wrong_source,
)
from placements.collectives.moves import DimCut, Move, apply
from placements.collectives.precision import (
    NOTHING_SAID,
    BackwardOptions,
    Dtypes,
    gradient_dtype,
    said_dtypes,
)
from placements.collectives.splits import splits
from placements.collectives.transport import AxisRanks
from placements.inference.retype import cast_pads, retyped, retyped_on_one_rank
from placements.inference.terms import Operand, Refusal
from placements.inference.transitions import Transition, find, unchanged
from placements.runtime import tags
from placements.runtime.errors import type_or_error
from placements.runtime.gradient_notes import Step, note_move
from placements.runtime.gradient_watch import follow_hook
from placements.runtime.ledger import UNRECORDED, Ledger, active_ledger
from placements.runtime.mesh import current_mesh
from placements.runtime.state import Checker, current, suspended
from placements.types.axis import AxisType, AxisTypeLike, Shard
from placements.types.errors import ArgumentError
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType
from placements.types.text import as_axis_type

Axis = str | dist.ProcessGroup
T = TypeVar("T")
# op_dtype, out_dtype, backward_options
SaidDtypes = tuple[torch.dtype | None, torch.dtype | None, BackwardOptions | None]


@dataclass(frozen=True)
class Request:
    """A call that was read: what is to become of `x` on one axis, and what is around it."""

    call: str
    x: Tensor
    ranks: AxisRanks
    mesh: Mesh | None  # None: the axis is a process group that the mesh does not have
    src: AxisType
    dst: AxisType
    row: Transition | None  # None: nothing is to be done
    dtypes: Dtypes
    new_dim: int
    sends: tuple[int, ...]  # of an exchange
    receives: tuple[int, ...]
    gradient_dtype: torch.dtype | None
    record: Ledger | None


class Ready(NamedTuple):
    """A call that was checked: the move that does it, and the type of its result."""

    request: Request
    move: Move | None  # None: nothing is to be done
    found: TensorType | None  # None: checking is off


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
    said = call, x, axis, src, dst, dtypes, new_dim, sends, receives
    mode = checker()
    if mode is None:
        other = current.other
        if other is not None:
            return other.moved(
                call, x, axis, src, dst, dtypes=dtypes, new_dim=new_dim,
                sends=sends, receives=receives,
            )  # fmt: skip
        ready = prepared(None, *said)
        return given(None, ready, launched(ready, apply))
    with unseen(), suspended():
        ready = prepared(mode, *said)
        return given(mode, ready, launched(ready, apply))


def checker() -> Checker | None:
    """Return the mode that checks a call here; None: the arguments alone say what to do."""
    mode = current.mode
    # What a hook makes of a gradient is noted on the result, whether checking is on or off.
    in_hook = mode is not None and mode.lenient and current.in_backward
    return None if in_hook else mode


def prepared(
    mode: Checker | None,
    call: str,
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike | None,
    dtypes: SaidDtypes,
    new_dim: int,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
) -> Ready:
    """Read a call, and check it if there is a mode. Nothing is sent yet."""
    request = _read(
        call, x, axis, src, dst, dtypes, new_dim, sends, receives, mode is not None
    )
    if mode is None:
        return _unchecked(request)
    known = tags.get(x)
    if mode.observer is not None:
        mode.observer.crossing(call, None, x, known)
    if known is None or known.fresh is not None:
        known = type_or_error(x, call)
    return _checked(request, known)


def launched(ready: Ready, do: Callable[[Move, Tensor], T]) -> T | Tensor:
    """Return what `do` makes of the tensor by the move; the tensor, if there is no move."""
    if ready.move is None:
        return ready.request.x
    if current.in_backward:  # in a hook, where raw collectives are refused
        with suspended():
            return do(ready.move, ready.request.x)
    return do(ready.move, ready.request.x)


def given(mode: Checker | None, ready: Ready, moved: Tensor) -> Tensor:
    """Return the result of a call, with its type, and with a note of what was done."""
    request = ready.request
    x, ranks = request.x, request.ranks
    if moved is x:
        return x
    if ranks.size > 1:  # it may be a gradient
        said = request.call, request.mesh, ranks.axis, request.src, request.dst
        step = note_move(x, moved, Step(*said, ""))
        if step is not None:
            follow_hook(x, step)
    if mode is not None and ready.found is not None:
        tags.put(moved, ready.found)
        if request.row is not None and request.row.is_cast:
            tags.note_cast(x, moved)
        if mode.observer is not None:
            mode.observer.crossing(request.call, "result", moved, tags.get(moved))
    return moved


def _read(
    call: str,
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike | None,
    dtypes: SaidDtypes,
    new_dim: int,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
    checked: bool,
) -> Request:
    """Return the request that a call's arguments make; ValueError if they make none."""
    chosen = NOTHING_SAID
    if dtypes != (None, None, None):
        chosen = said_dtypes(call, x.dtype, *dtypes)
    ranks, mesh = _ranks(call, axis, checked)
    gradients, record = None, None
    if ranks.size > 1:
        record = active_ledger()
        if record is not None and torch.compiler.is_dynamo_compiling():
            raise ValueError(f"{call}: {UNRECORDED}")
        gradients = gradient_dtype(ranks.axis) if x.requires_grad else None
    if dst is None:
        raise ValueError(
            f"{call} needs dst=R or dst=I: the backward depends on it. R if each rank "
            "uses the result in its own way, I if all repeat one computation"
        )
    before, after = _as_type(call, src, x), _as_type(call, dst, x)
    row = _row(call, x, ranks.axis, before, after)
    if row is None and chosen != NOTHING_SAID:
        row = unchanged(before)
    # Where the tensor is not what `src` says, that is refused, and not what follows of it.
    known = tags.get(x) if checked else None
    is_as_said = known is None or known.by_axis.get(ranks.axis, before) == before
    added = 0 if row is None else row.dims_added
    new_dim = _row_dim(call, new_dim, x, added) if added and is_as_said else 0
    exchanged: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    if row is not None and row.action == "exchange":
        exchanged = splits(x, ranks, sends, receives) if is_as_said else exchanged
    elif row is not None and (sends is not None or receives is not None):
        raise ValueError("split sizes go with src=V, dst=V: rows change ranks")
    if checked and row is not None and x.requires_grad and not torch.is_grad_enabled():
        if x.grad_fn is not None:  # everybody expects that a leaf gets no gradient there
            raise gradient_dropped(call, x)
    return Request(
        call, x, ranks, mesh, before, after, row, chosen, new_dim, *exchanged, gradients,
        record,
    )  # fmt: skip


def _ranks(call: str, axis: Axis, checked: bool) -> tuple[AxisRanks, Mesh | None]:
    """Return the ranks of an axis, given by name or process group, and the axis's mesh."""
    mesh = current_mesh()
    if isinstance(axis, str):
        if mesh is None:
            if on_many_ranks():
                raise ValueError(
                    f"axis {axis!r} is a name, but no mesh is current; "
                    "with set_current_mesh(mesh): ..."
                )
            return AxisRanks(axis, 1, 0, None), None
        size = mesh.sizes.get(axis) or mesh.require(axis)
        group = None if mesh.device_mesh is None else mesh.group(axis)
        unsent = size > 1 and mesh.device_mesh is None and not checked
        if unsent and on_many_ranks():
            raise ValueError(
                f"{mesh!r} is sizes alone, so nothing can be sent over {axis!r}; "
                "set_current_mesh takes the DeviceMesh of these ranks"
            )
        return AxisRanks(axis, size, mesh.place[axis], group), mesh
    for name in mesh.sizes if mesh is not None and mesh.device_mesh is not None else ():
        assert mesh is not None
        if mesh.group(name) is axis:
            return AxisRanks(name, mesh.sizes[name], mesh.place[name], axis), mesh
    rank = dist.get_rank(axis)
    if rank < 0:
        raise ValueError(f"{call}: this rank is not one of the ranks of the process group")
    return AxisRanks(axis.group_name, dist.get_world_size(axis), rank, axis), None


def _as_type(call: str, like: AxisTypeLike, x: Tensor) -> AxisType:
    """Return the type, its dim counted from the front; ValueError if `x` lacks the dim."""
    t = like if isinstance(like, AxisType) else as_axis_type(like)
    if not isinstance(t, Shard):
        return t
    if not -x.dim() <= t.dim < x.dim():
        raise ValueError(f"{call}: {t!r} names a dim that {x.dim()} dims do not have")
    return t if t.dim >= 0 else Shard(t.dim + x.dim(), t.extent)


def _row(
    call: str, x: Tensor, axis: str, src: AxisType, dst: AxisType
) -> Transition | None:
    """Return the row of the table; None where src and dst are the same."""
    of_one_dim = isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim
    # Without an extent dst asks for pieces of a dim, however they are cut: where another
    # axis cuts the dim too, extents differ by rank, but all ranks must say the same.
    cut_as_it_is = of_one_dim and isinstance(dst, Shard) and dst.extent is None
    keeps = call in ("redistribute", "convert", "reinterpret")
    if keeps and (cut_as_it_is or _reads_alike(src, dst)):
        return None
    row = find(call, src, dst)
    if row is None or of_one_dim:
        raise no_such_transition(call, x, axis, src, dst)
    return row


def _reads_alike(src: AxisType, dst: AxisType) -> bool:
    """Return whether both are written the same, extents included."""
    if src is dst or src.letter != dst.letter or not isinstance(src, Shard):
        return src.letter == dst.letter
    assert isinstance(dst, Shard)
    if src.dim == dst.dim and src.extent is dst.extent:
        return True  # compiled code has no text of sizes that it does not know
    return repr(src) == repr(dst)


def _row_dim(call: str, new_dim: int, x: Tensor, added: int) -> int:
    """Return which dim a row per rank is added at (`added` is 1) or taken from (-1)."""
    dims = x.dim() + (added == 1)
    if not -dims <= new_dim < dims:
        raise ArgumentError(
            f"{call}: dim {new_dim} is none of the {dims} dims of the "
            f"{'result' if added == 1 else 'tensor'}"
        )
    return new_dim % dims


def _unchecked(request: Request) -> Ready:
    row = request.row
    if row is None:
        return Ready(request, None, None)
    said = request.src, request.dst, request.new_dim
    cuts = cuts_as_said(row, request.x, request.ranks, *said)
    return Ready(request, _move(request, row, *cuts), None)


def _checked(request: Request, known: TensorType) -> Ready:
    x, row, ranks = request.x, request.row, request.ranks
    if ranks.size > 1:
        _check_operand(request, known)
    if row is None:
        return Ready(request, None, known)
    src_cut = dst_cut = None
    operand = Operand(known, tuple(x.shape), str(x.dtype).removeprefix("torch."), 0)
    try:
        if row.src == row.dst and row.action == "same":
            found = known
        elif ranks.size == 1:
            found = retyped_on_one_rank(row, operand, ranks.axis, request.new_dim)
        else:
            found = retyped(
                row, operand, ranks.axis, request.dst, new_dim=request.new_dim,
                receives=request.receives if row.action == "exchange" else None,
            ).type  # fmt: skip
            src_cut = _cut_in(known, ranks.axis) if row.src == "S" else None
            dst_cut = _cut_in(found, ranks.axis) if row.dst == "S" else None
    except Refusal as refusal:
        raise untypable(request.call, x, known, ranks.axis, refusal) from None
    if request.dtypes.op or request.dtypes.out:
        found = found.with_pads(cast_pads(found.pads))
    return Ready(request, _move(request, row, src_cut, dst_cut), found)


def _check_operand(request: Request, known: TensorType) -> None:
    """The tensor must live on the mesh and be what `src` says, with its extent."""
    call, x, axis, src = request.call, request.x, request.ranks.axis, request.src
    if request.mesh is None:
        raise no_axis_of_mesh(call, axis)
    if known.is_number and all(t.letter == "R" for t in known.types):
        if src.letter in "RI":
            return  # one number in sizes that are the same on all ranks
    if known.mesh is not request.mesh and known.mesh != request.mesh:
        raise on_another_mesh(call, x, known, axis, request.mesh)
    actual = known.by_axis[axis]
    if actual != src:
        raise wrong_source(call, x, known, axis, src, request.dst)
    if isinstance(src, Shard) and isinstance(actual, Shard) and src.extent is None:
        assert actual.extent is not None
        if not actual.extent.is_even:
            raise extent_left_out(call, x, known, axis, src)


def _cut_in(known: TensorType, axis: str) -> DimCut:
    shard = known[axis]
    assert isinstance(shard, Shard) and shard.extent is not None
    return shard.dim, shard.extent


def _move(
    request: Request, row: Transition, src_cut: DimCut | None, dst_cut: DimCut | None
) -> Move:
    return Move(
        row,
        request.ranks,
        src_cut,
        dst_cut,
        request.new_dim,
        request.sends,
        request.receives,
        dtypes=request.dtypes,
        gradient_dtype=request.gradient_dtype,
        record=request.record,
    )
