"""Buffers that are filled in parts: a write through a view tells the tensor below it.

A fresh tensor takes the type of what is written to it. Torch counts the writes to a memory
for all its names together, so a name whose count is behind is known to be out of date, and
asks the tensor below.
"""

from typing import NamedTuple

from torch import Tensor

from placements._torch import base_of
from placements.inference.parts import part_of, whole_after
from placements.runtime import tags
from placements.types.tensor import TensorType


class Below(NamedTuple):
    """A fresh tensor, and what it and a view of it were before the view was written."""

    tensor: Tensor
    whole: TensorType
    part: TensorType


def below(view: Tensor) -> Below | None:
    """Return the fresh tensor that is to be told of a write to `view`, if there is one."""
    base, part = base_of(view), tags.get(view)
    whole = None if base is None else tags.get(base)
    if base is None or part is None or whole is None or whole.fresh is None:
        return None
    return None if tags.is_overwritten(base) else Below(base, whole, part)


def tell(told: Below, view: Tensor) -> None:
    """Give the tensor below a view its type, after the view was written.

    Without a type that fits it stays out of date, and its next use is refused.
    """
    written = tags.get(view)
    whole = None if written is None else whole_after(told.whole, told.part, written)
    if whole is not None:
        tags.put(told.tensor, whole)


def is_behind(x: Tensor) -> bool:
    """Whether a fresh tensor does not know what became of its memory.

    It was written through another name, or the tensor below was declared.
    """
    if tags.is_overwritten(x):
        return True
    base = base_of(x)
    whole = None if base is None else tags.get(base)
    return whole is not None and whole.fresh is None


def up_to_date(x: Tensor) -> TensorType | None:
    """Return the type of a tensor, also after writes through other names; None: unknown."""
    known = tags.get(x)
    if known is None or known.fresh is None or not is_behind(x):
        return known
    base = base_of(x)
    whole = None if base is None or tags.is_overwritten(base) else tags.get(base)
    found = None if whole is None else part_of(whole, known)
    if found is not None:
        tags.put(x, found)
    return found
