"""Whether checking is on in this thread, and who does it: one small place to ask.

Code with checking off looks at `checkers.count` only, a plain number that is zero while no
thread checks; then `current.mode` says whether this thread does.
"""

import threading
from collections.abc import Generator
from contextlib import ContextDecorator, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Optional, Protocol

from torch import Tensor, nn

from placements.mesh import check_axes, current_mesh

if TYPE_CHECKING:
    from placements.propagate import Typecheck
    from placements.tensor_type import TensorType


class Observer(Protocol):
    """Who is told of values that cross a declared boundary; `verify()` is."""

    def crossing(
        self, where: str, name: str | None, x: Tensor, found: "TensorType | None"
    ) -> None: ...

    def stamped(self, module: nn.Module, name: str, x: Tensor) -> None: ...

    def backward(self) -> None: ...


class Current(threading.local):
    """The checker of this thread, and the axes on which generators are shared."""

    mode: Optional["Typecheck"] = None
    shared_axes: frozenset[str] = frozenset()
    is_opaque: bool = False  # inside code whose ops are not checked one by one
    in_backward: bool = False  # of a checked block: hooks are watched, ops are not


current = Current()


class Checkers:
    """How many `typecheck()` blocks are open, over all threads."""

    count = 0


checkers = Checkers()


def observer() -> Observer | None:
    """Who watches values in this thread, if anybody does."""
    return None if current.mode is None else current.mode.observer


@contextmanager
def suspended(*, in_backward: bool = False) -> Generator[None]:
    """Checking is off inside: backward, hooks and recomputation are not checked."""
    before = current.mode, current.in_backward
    current.mode, current.in_backward = None, in_backward
    try:
        yield
    finally:
        current.mode, current.in_backward = before


@contextmanager
def opaque() -> Generator[None]:
    """Inside, what is written to tensors is counted, not checked."""
    before, current.is_opaque = current.is_opaque, True
    try:
        yield
    finally:
        current.is_opaque = before


class Context(ContextDecorator):
    """A `with` block that must not get lost: `with a and b:` enters only b."""

    def __init__(self, *axes: str) -> None:
        self.axes = axes

    def _recreate_cm(self) -> "Context":
        return type(self)(*self.axes)  # as a decorator: one for each call

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has no truth value: `with a and b:` would enter only "
            "b; write `with a, b:`"
        )


class shared_generator(Context):  # noqa: N801 - reads as the claim it is
    """Say that on these axes all ranks' random generators are in the same state.

    Random ops then keep Replicate and Invariant values equal on those axes, and are
    refused on values that differ there. `verify()` compares the generators' states.
    """

    def __enter__(self) -> None:
        check_axes("shared_generator", current_mesh(), self.axes)
        self._before = current.shared_axes
        current.shared_axes = self._before.union(self.axes)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        current.shared_axes = self._before
