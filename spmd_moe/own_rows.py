"""Pieces of a global tensor seen as this rank's own rows, and back.

What sorts rows by data, or sends them to other ranks, works on rows of its own: there the
tokens are Varying. Forgetting that rows are pieces is always sound; saying it again is a
claim, which `combine` makes of rows that it put back in their tokens' order. With checking
off both do nothing.
"""

from torch import Tensor

from placements import Shard, Varying, reinterpret, type_of
from placements.types.axis import AxisType


def own_rows(x: Tensor) -> Tensor:
    """Shard -> Varying on every axis, from the outermost cut; other types stay."""
    for axis, t in _types(x):
        if isinstance(t, Shard):
            x = reinterpret(x, axis, src=t, dst=Varying())
    return x


def pieces_like(x: Tensor, example: Tensor) -> Tensor:
    """Varying -> Shard on every axis on which `example` is cut, from the innermost."""
    for axis, t in reversed(_types(example)):
        if isinstance(t, Shard):
            x = reinterpret(x, axis, src=Varying(), dst=t)
    return x


def _types(x: Tensor) -> list[tuple[str, AxisType]]:
    known = type_of(x)
    return [] if known is None else list(known.items())
