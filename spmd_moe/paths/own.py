"""A rank's own rows: pieces of a global tensor seen as no more than what is here.

Code that sorts rows by data, or sends them to other ranks, works on rows of its own.
"""

import torch
from torch import Tensor

from placements import AxisType, Shard, Varying, reinterpret, type_of, unchecked


def own_size(x: Tensor) -> int:
    """Return how many elements are here, as a plain number of this rank alone.

    What is compared with it, or computed of it, is about this rank and no other.
    """
    if torch.compiler.is_compiling():
        return x.numel()
    with unchecked():
        return x.numel()


def own_rows(x: Tensor) -> Tensor:
    """Shard -> Varying on every axis, from the outermost cut; other types stay.

    Code that sorts rows by data, or sends them to other ranks, works on rows of its own.
    To forget that rows are pieces of a global tensor is always sound. With checking off
    this does nothing.
    """
    for axis, t in _types(x):
        if isinstance(t, Shard):
            x = reinterpret(x, axis, src=t, dst=Varying())
    return x


def pieces_like(x: Tensor, example: Tensor) -> Tensor:
    """Varying -> Shard on every axis on which `example` is cut, from the innermost.

    This is a claim: `combine` makes it of rows that it put back in their tokens' order.
    With checking off this does nothing.
    """
    for axis, t in reversed(_types(example)):
        if isinstance(t, Shard):
            x = reinterpret(x, axis, src=Varying(), dst=t)
    return x


def _types(x: Tensor) -> list[tuple[str, AxisType]]:
    known = type_of(x)
    return [] if known is None else list(known.items())
