"""`with` blocks that a signal cannot leave half entered or half left.

Ctrl-C, or the alarm of a test, raises between any two bytecodes. A context manager written
in Python runs bytecode before its own `try` is reached: the first instruction of `__exit__`
may raise, and then the block is never left. So what a block does stands in a generator,
whose `try` already holds when the block ends, and C code calls the generator's `close`:
there is no bytecode in between. What must happen as a whole is done `together`.
"""

import functools
import inspect
import io
from collections import deque
from collections.abc import Callable, Generator, Iterable
from contextlib import ContextDecorator
from operator import call
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, cast

T = TypeVar("T")
A = ParamSpec("A")

Steps = Generator[T, None, None]

_ENDED = inspect.GEN_CLOSED


def together(calls: Iterable[Callable[[], Any]]) -> Callable[[], object]:
    """Return one C function that makes these calls, in order; it can be called once.

    Handlers of signals run between bytecodes, and the loop is in C as well, so none can run
    among the calls. They must be C functions, or `functools.partial` objects of them.
    """
    run = cast(Callable[..., object], deque)
    return functools.partial(run, map(call, list(calls)), 0)


class UsedWithWith(ContextDecorator):
    """Refuses, for all blocks, copies and uses in which the block would hold nothing."""

    def __call__(self, function: Any) -> Any:
        """Decorate a function: a block for each call."""
        tests = inspect.isgeneratorfunction, inspect.iscoroutinefunction
        if any(test(function) for test in (*tests, inspect.isasyncgenfunction)):
            raise TypeError(
                f"{function.__name__} returns before its body runs, so a block around the "
                "call would hold nothing: write the `with` inside of it"
            )
        return super().__call__(function)

    def __bool__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has no truth value: `with a and b:` would enter only "
            "b; write `with a, b:`"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} block cannot be copied: make another one")


class Block(UsedWithWith, io.IOBase, Generic[T]):
    """A `with` block whose generator `steps` yields once: before it, and after it.

    When the block ends the generator gets GeneratorExit, so what must be undone belongs
    into a `finally`. A signal may still stop the `finally` itself: keep it to one call of a
    C function, or write it so that it can be run twice.
    """

    _steps: Steps[T] | None = None
    close: Any

    def steps(self) -> Steps[T]:
        raise NotImplementedError(f"{type(self).__name__}.steps")

    def __enter__(self) -> T:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._steps is not None and inspect.getgeneratorstate(self._steps) != _ENDED:
            raise RuntimeError(
                f"this {type(self).__name__} block is open already: make another one "
                "for a block inside it"
            )
        steps = self._steps = self.steps()
        self.close = steps.close
        try:
            entered = next(steps)
        except BaseException:
            steps.close()
            raise
        return entered

    # This is C code, which calls `self.close()`. It is the only reason to be an IOBase.
    __exit__: Any = io.IOBase.__exit__


class _Made(Block[T]):
    """A block made by a function that `block` decorates."""

    def __init__(self, make: Callable[[], Steps[T]]) -> None:
        self._make = make

    def steps(self) -> Steps[T]:
        return self._make()

    def _recreate_cm(self) -> "_Made[T]":
        return _Made(self._make)  # as a decorator: one for each call


def block(steps: Callable[A, Steps[T]]) -> Callable[A, Block[T]]:
    """Make blocks as `contextlib.contextmanager` does, which a signal cannot tear."""

    @functools.wraps(steps)
    def made(*args: A.args, **kwargs: A.kwargs) -> Block[T]:
        return _Made(lambda: steps(*args, **kwargs))

    return made
