"""Whether checking is on in this thread, and who does it: one small place to ask.

Code with checking off looks at `checkers.count` only, a plain number that is zero while no
thread checks; then `current.mode` says whether this thread does.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from placements.propagate import Typecheck


class Current(threading.local):
    """The checker of this thread, and the axes on which generators are shared."""

    mode: Optional["Typecheck"] = None
    shared_axes: frozenset[str] = frozenset()


current = Current()


class Checkers:
    """How many `typecheck()` blocks are open, over all threads."""

    count = 0


checkers = Checkers()


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
