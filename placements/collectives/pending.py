"""The result of a collective that was started and not waited for yet.

It is no tensor: its rows are on their way, so whoever used it would compute with whatever
lies in its memory. Every use of it as a tensor is one error, which says to wait.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from placements import _torch
from placements._torch import in_backward, unseen
from placements.collectives import in_flight, transport
from placements.collectives.in_flight import Flight
from placements.collectives.request import (
    Axis,
    Ready,
    SaidDtypes,
    checker,
    given,
    launched,
    prepared,
)
from placements.runtime.callsite import located
from placements.runtime.errors import NotWaitedWarning, PlacementError, refused_call
from placements.runtime.state import Checker, current, suspended
from placements.runtime.unchecked import warn_user
from placements.types.axis import AxisTypeLike

# What is under way and was dropped; its memory is kept until it is there. By the group
# itself and then by thread: a group of the same name that is made later has not sent it.
_dropped: WeakKeyDictionary[Any, dict[int, list[Tensor]]] = WeakKeyDictionary()


class Pending:
    """A tensor that is on its way: `wait()` gives it, once.

    Waiting twice is an error, as nothing keeps the tensor for a second caller: its memory
    is freed with the last name of it. Between the start and the wait nobody may write to
    the tensor that is sent. A pending that is dropped is told of by a NotWaitedWarning;
    nothing waits for it, so an error between start and wait is raised at once.
    """

    _flight: Flight | None = None

    def __init__(self, ready: Ready, flight: Flight, where: str, watched: bool) -> None:
        self._ready = ready
        self._where = where
        self._watched = watched
        self._thread = threading.get_ident() if watched else 0
        # A checkpoint stops to compute again as soon as it has what backward needs.
        self._again = watched and in_backward()
        self._flight = flight

    def wait(self) -> Tensor:
        """Return the result, which has its type if the call was checked."""
        flight, self._flight = self._flight, None
        if flight is None:
            raise refused_call(
                "wait",
                f"the result of {self._where} was waited for already",
                rule="a pending gives its tensor once, and keeps no name of it",
                advice="keep what wait() returned",
            )
        mode = checker()
        if mode is None:
            return self._landed(None, flight)
        with unseen(), suspended():
            if mode.observer is not None:
                mode.observer.waited(self)
            return self._landed(mode, flight)

    def _landed(self, mode: Checker | None, flight: Flight) -> Tensor:
        moved = launched(self._ready, lambda move, x: in_flight.land(flight))
        if self._watched:
            _forget_dropped(flight, self._thread)
        if in_flight.was_written(flight):
            raise refused_call(
                "wait",
                f"the tensor that {self._where} sends was written to before the wait",
                rule="until an exchange is waited for, its rows are read",
                advice="write after wait(), or start the exchange with x.clone()",
            )
        return given(mode, self._ready, moved)

    @property
    def is_waited(self) -> bool:
        """Whether `wait()` was called."""
        return self._flight is None

    def not_waited(self) -> str:
        """Return what is to be said of a pending that nobody waits for."""
        return (
            f"{self._where}: the exchange was started and never waited for; its result is "
            "lost, and backward does not know of it. Call wait(), also where the result "
            "is not needed. If an error came in between, this only follows from it"
        )

    def __del__(self) -> None:
        flight = self._flight
        if flight is None or not self._watched or sys.is_finalizing():
            return
        if flight.move.ranks.group is not None:
            by_thread = _dropped.setdefault(flight.move.ranks.group, {})
            by_thread.setdefault(self._thread, []).append(flight.received)
        if not self._again:
            warn_user(self.not_waited(), NotWaitedWarning)

    def __repr__(self) -> str:
        state = "waited for" if self.is_waited else "under way: wait() gives its tensor"
        return f"<{self._where}, {state}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        raise self._refused(f".{name}")

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        every = _torch.pytree.tree_leaves((args, kwargs))  # torch.cat takes a list
        pending = next(x for x in every if isinstance(x, Pending))
        raise pending._refused(getattr(func, "__name__", str(func)))

    def _refused(self, use: str) -> PlacementError:
        return refused_call(
            use,
            f"the result of {self._where} is used before it is waited for",
            rule="its rows are under way, so its memory holds anything",
            advice="x = pending.wait(), and then use x",
        )


class Arrived(Pending):
    """A result that is there already: another engine, which knows no start, made it."""

    def __init__(self, call: str, result: Tensor) -> None:
        self._where, self._watched = f"{call}_start", False
        self._result: Tensor | None = result

    def wait(self) -> Tensor:
        """Return the result, once."""
        result, self._result = self._result, None
        if result is None:
            raise self._refused("wait")
        return result

    @property
    def is_waited(self) -> bool:
        """Whether `wait()` was called."""
        return self._result is None


def start(
    call: str,
    x: Tensor,
    axis: Axis,
    src: AxisTypeLike,
    dst: AxisTypeLike,
    dtypes: SaidDtypes,
    sends: Sequence[int] | None,
    receives: Sequence[int] | None,
) -> Pending:
    """Begin to carry out `call`, with the arguments of `run`."""
    said = call, x, axis, src, dst, dtypes, 0, sends, receives
    mode = checker()
    if mode is None:
        other = current.other
        if other is not None:
            arrived = other.moved(
                call, x, axis, src, dst, dtypes=dtypes, new_dim=0,
                sends=sends, receives=receives,
            )  # fmt: skip
            return Arrived(call, arrived)
        return _started(prepared(None, *said))
    with unseen(), suspended():
        pending = _started(prepared(mode, *said))
    if mode.observer is not None:
        mode.observer.started(pending)
    return pending


def _started(ready: Ready) -> Pending:
    flight = launched(ready, in_flight.start)
    assert isinstance(flight, Flight), "an exchange always moves"
    if torch.compiler.is_compiling():
        return Pending(ready, flight, ready.request.call, False)
    return Pending(ready, flight, located(ready.request.call), True)


def _forget_dropped(flight: Flight, thread: int) -> None:
    """Let go of the memory of flights that were dropped.

    They began before this one, on the same group, so they have landed.
    """
    ranks = flight.move.ranks
    if not _dropped or ranks.group is None:
        return
    for received in _dropped.get(ranks.group, {}).pop(thread, ()):
        transport.arrived(ranks, received)


def _refusing(name: str) -> Any:
    def refusing(self: Pending, *others: Any) -> Any:
        raise self._refused(name)  # pyright: ignore[reportPrivateUsage]

    return refusing


# What Python looks up on the class, and not by `__getattr__`.
_OPERATORS = (
    "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift "
    "radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow rand ror rxor rlshift rrshift "
    "neg pos abs invert eq ne lt le gt ge getitem setitem len iter contains "
    "bool int float complex index array reduce_ex"
)
for _name in _OPERATORS.split():
    setattr(Pending, f"__{_name}__", _refusing(f"__{_name}__"))
