"""An exchange that is under way: started, and waited for later, in backward too.

Two nodes of autograd stand for it. The first is where it starts, the second where it is
waited for, and what lies between them in the program overlaps with it. Backward meets them
in the other order: the second node starts the exchange of the gradient, the engine runs
what lies between, and the first node waits.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from placements._torch import in_transform, version_of
from placements.collectives import transport
from placements.collectives.moves import Move, apply, run_dual, told
from placements.runtime.state import current, suspended


class Flight(NamedTuple):
    """What is under way: `received` may not be read before the flight has landed."""

    move: Move
    received: Tensor
    ticket: Tensor  # leads autograd from the end of the flight to its start
    sent: Tensor
    version: int  # of `sent`, when it was handed over

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way, as the move was run when it was started."""
        return self.ticket is self.received


def start(move: Move, x: Tensor) -> Flight:
    """Begin to run the move; the dual of the move is the backward of both halves."""
    move = told(move)
    version = 0 if torch.compiler.is_compiling() else version_of(x)
    if move.ranks.size == 1 or in_transform():  # the two nodes have no form for torch.func
        result = apply(move, x)
        return Flight(move, result, result, x, version)
    received = move.start(x.detach())
    return Flight(move, received, _ticket(x, move), x, version)


def land(flight: Flight) -> Tensor:
    """Wait for a flight, and return what its move makes of the tensor."""
    if flight.is_over:
        return flight.received
    return _landed(flight.ticket, flight.received, flight.move)


def was_written(flight: Flight) -> bool:
    """Return whether the program wrote to the memory that is being sent."""
    if torch.compiler.is_compiling():
        return False
    return version_of(flight.sent) != flight.version


class _Ticket(torch.autograd.Function):
    """The start. Backward: waits for the gradient, which is under way."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, move: Move) -> Tensor:
        ctx.move = move  # pyright: ignore[reportAttributeAccessIssue]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            return grads[0], None
        with _where_hooks_may_send():
            return transport.arrived(ctx.move.ranks, grads[0]), None


class _Landed(torch.autograd.Function):
    """The end. Backward: starts the exchange of the gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, ticket: Tensor, received: Tensor, move: Move) -> Tensor:
        ctx.move = move  # pyright: ignore[reportAttributeAccessIssue]
        ctx.dtype = ticket.dtype  # pyright: ignore[reportAttributeAccessIssue]
        return move.finish(received, ticket.dtype).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        dual, grad = ctx.move.dual(ctx.dtype), grads[0]
        with _where_hooks_may_send():
            if _may_fly(dual, grad, ctx.dtype):
                return dual.start(grad), None, None
            return run_dual(dual, grad), None, None


def _may_fly(dual: Move, grad: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a gradient may go from one node to the other while it is under way.

    What arrives must be the gradient of the first node as it is, as autograd looks at its
    shape and casts it to its dtype. Nobody else may look at it: not a second
    differentiation, and not the mode that searches for NaN.
    """
    return (
        dual.row.action == "exchange"
        and dual.dtypes.chosen(grad.dtype, sums=False)[0] == dtype
        and not torch.is_grad_enabled()
        and (torch.compiler.is_compiling() or not torch.is_anomaly_enabled())
    )


def _where_hooks_may_send() -> AbstractContextManager[None]:
    """In backward raw collectives are refused, as hooks of the user's might call them."""
    return suspended() if current.in_backward else nullcontext()


_ticket = cast(Callable[[Tensor, Move], Tensor], _Ticket.apply)  # pyright: ignore[reportUnknownMemberType]
_landed = cast(Callable[[Tensor, Tensor, Move], Tensor], _Landed.apply)  # pyright: ignore[reportUnknownMemberType]
