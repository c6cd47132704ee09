"""A transition applied to a tensor: its action, and its backward from the same table."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from placements._torch import in_transform
from placements.collectives import transport
from placements.collectives.precision import NOTHING_SAID, Dtypes
from placements.collectives.transport import AxisRanks
from placements.inference.transitions import Transition, dual_transition
from placements.runtime.callsite import caller
from placements.runtime.ledger import Entry, Ledger
from placements.runtime.state import current, suspended
from placements.types.extents import Extent
from placements.types.meaning import take_piece

DimCut = tuple[int, Extent]


@dataclass(frozen=True)
class Move:
    """One transition on one axis, with all that its action needs to know."""

    row: Transition
    ranks: AxisRanks
    src_cut: DimCut | None = None  # where src is a Shard
    dst_cut: DimCut | None = None  # where dst is a Shard
    new_dim: int = 0  # of a stack or an unbind
    sends: tuple[int, ...] = ()  # of an exchange
    receives: tuple[int, ...] = ()
    dtypes: Dtypes = NOTHING_SAID
    gradient_dtype: torch.dtype | None = None  # in which backward sums by default
    record: Ledger | None = None
    site: str = ""
    is_backward: bool = False

    def dual(self, dtype: torch.dtype) -> "Move":
        """Return the move of the gradient, to `dtype`: src and dst change places."""
        row, said = dual_transition(self.row), self.dtypes.backward or NOTHING_SAID
        by_policy = self.gradient_dtype if row.sums and dtype.is_floating_point else None
        return replace(
            self,
            row=row,
            dtypes=Dtypes(said.op or by_policy, said.out or dtype, said.backward),
            src_cut=self.dst_cut,
            dst_cut=self.src_cut,
            sends=self.receives,
            receives=self.sends,
            is_backward=not self.is_backward,
        )

    def run(self, x: Tensor) -> Tensor:
        """Return what the move makes of `x`; `x` itself where it moves nothing."""
        if self.dtypes == NOTHING_SAID:
            return self._run(x)
        op_dtype, out_dtype = self.dtypes.chosen(x.dtype, sums=self.row.sums)
        return self._run(x.to(op_dtype)).to(out_dtype)

    def _run(self, x: Tensor) -> Tensor:
        """Return what the move makes of `x`, in the dtype of `x`."""
        if self.ranks.size == 1:
            return _on_one_rank(self, x)
        self._tell(x)
        return _ACTIONS[self.row.action](self, x)

    def start(self, x: Tensor) -> Tensor:
        """Begin an exchange over several ranks; `finish` makes its result of what is sent.

        What this returns is in flight, and nobody may read it.
        """
        x = x.to(self.dtypes.chosen(x.dtype, sums=False)[0])
        self._tell(x)
        return _EXCHANGES[self.row.action][0](self, x)

    def finish(self, in_flight: Tensor, given: torch.dtype) -> Tensor:
        """Wait for what `start` began on a tensor of dtype `given`; return the result."""
        result = _EXCHANGES[self.row.action][1](self, in_flight)
        return result.to(self.dtypes.chosen(given, sums=False)[1])

    def _tell(self, x: Tensor) -> None:
        """Tell the ledger, if one is open, that `x` is handed to the collective."""
        if self.record is None:
            return
        kind = self.row.communicates
        if kind is None:
            return
        name = str(x.dtype).removeprefix("torch.")
        carried = self.carried(x)
        self.record.add(
            Entry(self.ranks.axis, kind, carried, name, self.site, self.is_backward)
        )

    def carried(self, x: Tensor) -> int:
        """Return the bytes that this rank hands to the collective, pieces padded alike."""
        shape = list(x.shape)
        if self.row.action in ("gather", "recut") and self.src_cut is not None:
            dim, extent = self.src_cut
            shape[dim] = transport.longest(extent)
        if self.row.action in ("sum and cut", "recut") and self.dst_cut is not None:
            dim, extent = self.dst_cut
            shape[dim] = transport.longest(extent) * self.ranks.size
        return math.prod(shape) * x.element_size()


def _on_one_rank(move: Move, x: Tensor) -> Tensor:
    """Do any action over one rank: the value stays, and only a dim may come or go."""
    if move.row.dims_added == 1:  # not unsqueeze: its backward gives a view
        return x.repeat(*[1] * (x.dim() + 1)).movedim(0, move.new_dim)
    if move.row.dims_added == -1:
        x = x.select(move.new_dim, 0)
    return x if move.row.is_cast else x.clone()


def _same(move: Move, x: Tensor) -> Tensor:
    return x


def _first_only(move: Move, x: Tensor) -> Tensor:
    return x if move.ranks.rank == 0 else torch.zeros_like(x)


def _sum(move: Move, x: Tensor) -> Tensor:
    return transport.sum_over(move.ranks, x)


def _gather(move: Move, x: Tensor) -> Tensor:
    assert move.src_cut is not None
    return transport.gather_pieces(move.ranks, x, *move.src_cut)


def _stack(move: Move, x: Tensor) -> Tensor:
    return transport.stack_all(move.ranks, x).movedim(0, move.new_dim)


def _sum_and_cut(move: Move, x: Tensor) -> Tensor:
    assert move.dst_cut is not None
    return transport.sum_and_cut(move.ranks, x, *move.dst_cut)


def _sum_and_unbind(move: Move, x: Tensor) -> Tensor:
    return transport.sum_rows(move.ranks, x.movedim(move.new_dim, 0))


def _send_rows(move: Move, x: Tensor) -> Tensor:
    return transport.start_exchange(move.ranks, x, move.sends, move.receives)


def _receive_rows(move: Move, in_flight: Tensor) -> Tensor:
    return transport.arrived(move.ranks, in_flight)


def _send_blocks(move: Move, x: Tensor) -> Tensor:
    assert move.src_cut is not None and move.dst_cut is not None
    blocks = transport.blocks_for_ranks(move.ranks, x, move.src_cut, move.dst_cut)
    ones = [1] * move.ranks.size
    return transport.start_exchange(move.ranks, blocks, ones, ones)


def _receive_blocks(move: Move, in_flight: Tensor) -> Tensor:
    assert move.src_cut is not None and move.dst_cut is not None
    blocks = transport.arrived(move.ranks, in_flight)
    return transport.put_blocks(move.ranks, blocks, move.src_cut, move.dst_cut)


# Actions that can be started and finished apart: what is done before and after the wait.
_Half = Callable[[Move, Tensor], Tensor]
_EXCHANGES: dict[str, tuple[_Half, _Half]] = {
    "exchange": (_send_rows, _receive_rows),
    "recut": (_send_blocks, _receive_blocks),
}


def _exchange(move: Move, x: Tensor) -> Tensor:
    send, receive = _EXCHANGES[move.row.action]
    return receive(move, send(move, x))


def _cut(move: Move, x: Tensor) -> Tensor:
    assert move.dst_cut is not None
    return take_piece(x, *move.dst_cut, move.ranks.rank).clone()


def _place(move: Move, x: Tensor) -> Tensor:
    assert move.src_cut is not None
    return transport.place_piece(move.ranks, x, *move.src_cut)


def _unbind(move: Move, x: Tensor) -> Tensor:
    return x.select(move.new_dim, move.ranks.rank).clone()


def _place_row(move: Move, x: Tensor) -> Tensor:
    rows = [
        x if rank == move.ranks.rank else torch.zeros_like(x)
        for rank in range(move.ranks.size)
    ]
    return torch.stack(rows, move.new_dim)


_ACTIONS: dict[str, Callable[[Move, Tensor], Tensor]] = {
    "same": _same,
    "first only": _first_only,
    "sum": _sum,
    "gather": _gather,
    "stack": _stack,
    "sum and cut": _sum_and_cut,
    "sum and unbind": _sum_and_unbind,
    "exchange": _exchange,
    "recut": _exchange,
    "cut": _cut,
    "place": _place,
    "unbind": _unbind,
    "place row": _place_row,
}


class _Apply(torch.autograd.Function):
    """Forward: the move. Backward: its dual, itself differentiable."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, move: Move) -> Tensor:
        ctx.move = move  # pyright: ignore[reportAttributeAccessIssue]
        ctx.dtype = x.dtype  # pyright: ignore[reportAttributeAccessIssue]
        result = move.run(x)
        return x.view_as(x) if result is x else result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if current.in_backward:  # where raw collectives of hooks are refused
            with suspended():
                return run_dual(ctx.move.dual(ctx.dtype), grads[0]), None
        return run_dual(ctx.move.dual(ctx.dtype), grads[0]), None


class _Transformed(torch.autograd.Function):
    """The same in a form that the transforms of torch.func know, and that takes longer."""

    @staticmethod
    def forward(x: Tensor, move: Move) -> Tensor:
        result = move.run(x)
        return x.view_as(x) if result is x else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Move], output: Tensor) -> None:
        x, ctx.move = inputs
        ctx.dtype = x.dtype

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(grads[0], ctx.move.dual(ctx.dtype)), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _apply(tangents[0], ctx.move)  # moves are linear


def run_dual(dual: Move, grad: Tensor) -> Tensor:
    """Run the move of a gradient, in backward."""
    if torch.is_grad_enabled():  # this backward is itself differentiated
        return _apply(grad, dual)
    # Where nothing moves this is the tensor that came in, not a view of it. A leaf takes
    # over a gradient that nobody else has, so the gradients of two leaves would be one
    # memory if each were given a view.
    return dual.run(grad)


_APPLY: tuple[Callable[[Tensor, Move], Tensor], ...] = (
    cast(Any, _Apply).apply, cast(Any, _Transformed).apply
)  # fmt: skip


def _apply(x: Tensor, move: Move) -> Tensor:
    return _APPLY[in_transform()](x, move)


def apply(move: Move, x: Tensor) -> Tensor:
    """Run the move, with its dual as backward."""
    if move.ranks.size == 1 and move.dtypes == NOTHING_SAID:
        # Torch's own backward of these is the dual, and gives no views of a gradient.
        result = move.run(x)
        return torch.ops.aten.alias(x) if result is x else result
    return _apply(x, told(move))


def told(move: Move) -> Move:
    """Return the move with the place of the call, if a ledger is open."""
    return move if move.record is None else replace(move, site=caller())
