"""Pure: what becomes of rows of padding in a transition, which moves whole tensors."""

from dataclasses import replace

from placements.pad_rules import NO_PADS, cast, refused
from placements.terms import Operand
from placements.transitions import Transition
from placements.types import Shard
from placements.validity import Pads

SENT = "rows of padding would be sent like the others, and their mask would stay here"
STACKED = "each rank has rows of padding of its own, so no one mask fits their stack"
TAKEN = "one row per rank is taken from a dim that has rows of padding"


def moved_pads(row: Transition, x: Operand, axis: str, new_dim: int) -> tuple[Pads, ...]:
    """The rows of padding of `x` after the transition; Refusal if their mask is lost."""
    return tuple(_moved(row, x, axis, new_dim, pads) for pads in x.type.pads)


def _moved(row: Transition, x: Operand, axis: str, new_dim: int, pads: Pads) -> Pads:
    match row.action:
        case "exchange" if 0 in pads.dims:
            raise refused(SENT, x, pads, NO_PADS)
        case "stack" | "place row":
            raise refused(STACKED, x, pads, NO_PADS)
        case "unbind" | "sum and unbind":
            if new_dim in pads.dims:
                raise refused(TAKEN, x, pads, NO_PADS)
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
    """Rows of padding of a tensor that takes another dtype."""
    return tuple(replace(one, holds=cast([one.holds])) for one in pads)


def _unless_summed(row: Transition, holds: int | None) -> int | None:
    """A number other than zero is not itself any more when the ranks' are summed."""
    return None if "P" in (row.src, row.dst) else holds
