"""Whether checking is on for the code that runs here, and which mode checks it.

`checkers.count` is a plain number that is zero while no block is open anywhere. So code
with checking off looks at that number alone, which `torch.compile` understands. Context
variables hold the rest: a thread, and a task of asyncio, has its own.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from threading import Lock, get_ident
from typing import Any, Optional, Protocol

from torch import Tensor, nn

from placements._torch import unseen
from placements.runtime.blocks import Block, Steps, block, together
from placements.runtime.mesh import check_axes, current_mesh
from placements.runtime.scopes import Scoped
from placements.types.axis import TypesLike
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType


class Observer(Protocol):
    """The listener that is told of values at declared boundaries: that of `verify()`."""

    def crossing(
        self, where: str, name: str | None, x: Tensor, found: TensorType | None
    ) -> None: ...

    def stamped(self, module: nn.Module, name: str, x: Tensor) -> None: ...

    def backward(self) -> None: ...

    def asked(self, question: Any, answer: Any) -> None: ...

    def started(self, pending: Any) -> None: ...

    def waited(self, pending: Any) -> None: ...


class Checker(Protocol):
    """The mode that checks the ops of a block."""

    @property
    def lenient(self) -> bool: ...

    @property
    def observer(self) -> Observer | None: ...

    def trusting(self) -> Block[None]: ...

    def afresh(self) -> "AbstractContextManager[Checker]": ...


class OtherEngine(Protocol):
    """A checker of somebody else's in the place of ours: what our words mean there."""

    def moved(
        self,
        call: str,
        x: Tensor,
        axis: Any,
        src: Any,
        dst: Any,
        *,
        dtypes: tuple[Any, Any, Any],
        new_dim: int,
        sends: Any,
        receives: Any,
    ) -> Tensor: ...

    def declared(self, x: Tensor, types: TypesLike) -> Tensor: ...

    def type_of(self, x: Tensor) -> TensorType | None: ...

    def presented(self, x: Tensor, mesh: Mesh) -> Tensor: ...

    def numbered(self, rows: Tensor, x: Tensor, axes: frozenset[str]) -> Tensor: ...

    def stamped(self, module: nn.Module) -> None: ...

    def called(
        self, fn: Callable[..., Any], bound: Any, hints: Mapping[str, Any]
    ) -> Any: ...

    def region(
        self, fn: Callable[..., Any], args: Any, settings: Any, ins: Any, outs: Any
    ) -> Any: ...


class OpenBlock:
    """A block that was entered, and the blocks around it.

    A block may be left in another order than it was entered (generators), and in another
    thread or context (a generator that is finalised there). So whoever still refers to a
    block asks whether the block `is_open`.
    """

    __slots__ = ("is_open", "mode", "outer", "thread")

    def __init__(self, mode: Checker, outer: Optional["OpenBlock"]) -> None:
        self.mode = mode
        self.outer = outer
        self.thread = get_ident()
        self.is_open = True


def innermost(found: OpenBlock | None) -> OpenBlock | None:
    """Return the first block that is open, of this thread: torch's modes are per thread."""
    while found is not None and not (found.is_open and found.thread == get_ident()):
        found = found.outer
    return found


# What holds for the code that runs in one context. One C call puts each of them back.
block_here: ContextVar[OpenBlock | None] = ContextVar("placements_block", default=None)
_shared_axes: Scoped[frozenset[str]] = Scoped("placements_shared_axes", frozenset())
_is_opaque: Scoped[bool] = Scoped("placements_opaque", False)
_in_backward: ContextVar[bool] = ContextVar("placements_in_backward", default=False)
_other: Scoped[OtherEngine | None] = Scoped("placements_other_engine", None)


# The axes on which random generators are shared.
shared_axes = _shared_axes.get


class Checkers:
    """How many blocks are open, over all threads."""

    def __init__(self) -> None:
        self.count = 0


checkers = Checkers()
others = Checkers()  # blocks in which another engine checks
_counting = Lock()


class Current:
    """The state of this context, by name."""

    @property
    def mode(self) -> Checker | None:
        """The checker of the block that this code is in."""
        if not checkers.count:
            return None
        found = block_here.get()
        if found is not None and not (found.is_open and found.thread == get_ident()):
            found = innermost(found)
        return None if found is None else found.mode

    @property
    def other(self) -> OtherEngine | None:
        """The engine that checks this code in the place of ours."""
        return _other.get() if others.count else None

    @property
    def shared_axes(self) -> frozenset[str]:
        """The axes on which random generators are shared."""
        return shared_axes()

    @property
    def is_opaque(self) -> bool:
        """Inside code whose ops are not checked one by one."""
        return checkers.count > 0 and _is_opaque.get()

    @property
    def in_backward(self) -> bool:
        """In backward of a checked block: hooks are watched, ops are not."""
        return checkers.count > 0 and _in_backward.get()


current = Current()


def observer() -> Observer | None:
    """Return the listener of the block that this code is in, if the block has one."""
    mode = current.mode
    return None if mode is None else mode.observer


@block
def suspended(*, in_backward: bool = False) -> Steps[None]:
    """Switch checking off inside: for backward, hooks and recomputation."""
    outside, was_in_backward = block_here.get(), _in_backward.get()
    put_back = partial(block_here.set, outside)
    if in_backward != was_in_backward:
        put_back = together([put_back, partial(_in_backward.set, was_in_backward)])
    try:
        block_here.set(None)
        if in_backward != was_in_backward:
            _in_backward.set(in_backward)
        yield
    finally:
        put_back()


@block
def checked_by(engine: OtherEngine) -> Steps[None]:
    """Let another engine check inside; ours must be off."""
    if current.mode is not None:
        raise ValueError("one engine checks a program: typecheck() is open here already")
    with _counting:
        others.count += 1
    try:
        with _other.hold(engine):
            yield
    finally:
        with _counting:
            others.count -= 1


def unchecked() -> AbstractContextManager[None]:
    """Run torch calls inside without checking them; their results have no type.

    For code that looks at values or fills memory and is no part of the computation whose
    types are checked. Who writes to a tensor inside answers for its values: a type that a
    factory gave the tensor is then no longer true, and `forget_factory` clears it.
    """
    return unseen()


def opaque() -> Block[None]:
    """Count the writes to tensors inside, and do not check them."""
    return _is_opaque.hold(True)


def sharing(axes: frozenset[str]) -> Block[None]:
    """Take random generators to be shared on these axes and no others, inside."""
    return _shared_axes.hold(axes)


class AxesBlock(Block[None]):
    """A `with` block for some axes."""

    def __init__(self, *axes: str) -> None:
        self.axes = axes

    def _recreate_cm(self) -> "AxesBlock":
        return type(self)(*self.axes)  # as a decorator: one block for each call


class shared_generator(AxesBlock):  # noqa: N801 - reads as the claim it is
    """Say that on these axes all ranks' random generators are in the same state.

    Random ops then keep Replicate and Invariant values equal on those axes, and are
    refused on values that differ there. `verify()` compares the generators' states.
    """

    def steps(self) -> Steps[None]:
        check_axes("shared_generator", current_mesh(), self.axes)
        with sharing(current.shared_axes.union(self.axes)):
            yield
