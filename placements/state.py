"""Whether checking is on in this thread, and who does it: one small place to ask.

Code with checking off looks at `checkers.count` only, a plain number that is zero while no
thread checks; then `current.mode` says whether this thread does.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Optional, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from placements.propagate import Typecheck
    from placements.tensor_type import TensorType


class Observer(Protocol):
    """Who is told of values that cross a declared boundary; `verify()` is."""

    def crossing(
        self, where: str, name: str | None, x: Tensor, found: "TensorType | None"
    ) -> None: ...

    def stamped(self, module: nn.Module, name: str, x: Tensor) -> None: ...


class Current(threading.local):
    """The checker of this thread, and the axes on which generators are shared."""

    mode: Optional["Typecheck"] = None
    shared_axes: frozenset[str] = frozenset()


current = Current()


class Checkers:
    """How many `typecheck()` blocks are open, over all threads."""

    count = 0


checkers = Checkers()


def observer() -> Observer | None:
    """Who watches values in this thread, if anybody does."""
    return None if current.mode is None else current.mode.observer


@contextmanager
def suspended() -> Generator[None]:
    """Checking is off inside: backward, hooks and recomputation are not checked."""
    mode, current.mode = current.mode, None
    try:
        yield
    finally:
        current.mode = mode


@contextmanager
def shared_generator(*axes: str) -> Generator[None]:
    """Say that on these axes all ranks' random generators are in the same state.

    Random ops then keep Replicate and Invariant values equal on those axes, and are
    refused on values that differ there.
    """
    before = current.shared_axes
    current.shared_axes = before | frozenset(axes)
    try:
        yield
    finally:
        current.shared_axes = before
