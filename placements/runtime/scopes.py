"""A value that holds until its scope ends, in whatever order and thread scopes end.

Generators may end in another order than they began, and in another thread or context when
they are finalised there. So a context variable alone is not enough: to put back the old
value would undo what others have set since. Here every scope knows whether it is still
open, and the value is that of the innermost open scope.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, NoReturn, Self, TypeVar

import torch

from placements.runtime.blocks import Block, Steps, block

T = TypeVar("T")


class Scope(Generic[T]):
    """One value, and the scopes around it. To end it, set `is_open` to False.

    That is one bytecode, so no signal can come in the middle of it.
    """

    __slots__ = ("is_open", "outer", "value")

    def __init__(self, value: T, outer: "Scope[T] | None") -> None:
        self.value = value
        self.outer = outer
        self.is_open = True


class Scoped(Generic[T]):
    """The value of the innermost open scope of this context, or a default."""

    def __init__(self, name: str, default: T) -> None:
        self.innermost: ContextVar[Scope[T] | None] = ContextVar(name, default=None)
        self._outermost = _outermost(default, self.innermost)

    def get(self) -> T:
        scope: Scope[T] = self._outermost.innermost
        return scope.value if scope.is_open else self.open_scope().value

    def open_scope(self) -> Scope[T]:
        """Return the innermost open scope of this context."""
        scope: Scope[T] = self._outermost.innermost
        if scope.is_open:
            return scope
        scope = _open(scope)
        if not torch.compiler.is_compiling():  # what is traced sets no context variable
            self.innermost.set(scope)
        return scope

    def all(self) -> list[T]:
        """Return the values of all open scopes of this context, the innermost first."""
        found: list[T] = []
        scope: Scope[T] = self._outermost.innermost
        while scope.outer is not None:
            if scope.is_open:
                found.append(scope.value)
            scope = scope.outer
        return found

    def scope(self, value: T) -> Scope[T]:
        """Return a scope that has not begun."""
        return Scope(value, self.open_scope())

    def begin(self, scope: Scope[T]) -> None:
        self.innermost.set(scope)

    @block
    def hold(self, value: T) -> Steps[None]:
        """Let the value hold until the block ends."""
        scope = self.scope(value)
        try:
            self.begin(scope)
            yield
        finally:
            scope.is_open = False
            self.open_scope()  # compiled code need not look past what has ended


class HeldAtOnce(Block[T]):
    """A block whose value holds as soon as the block is made, with or without `with`.

    If a signal comes between the constructor and the `with` block, the value holds as after
    the call alone.
    """

    of: Scoped[T]  # what the block is about
    begin: Callable[[], object]  # C code

    @staticmethod
    def read(*args: Any, **kwargs: Any) -> Any:
        """Return the value that the argument of the constructor means."""
        raise NotImplementedError

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if torch.compiler.is_dynamo_compiling():
            held: Any = HeldWhileTraced(cls.of, cls.read(*args, **kwargs))
            return held
        return super().__new__(cls)

    def __init__(self, said: Any) -> None:
        self._value: T = self.read(said)
        self._prepare()
        try:  # a signal may come as soon as the value holds
            self.begin()
        except BaseException:
            self.scope.is_open = False
            raise

    def _prepare(self) -> None:
        self.scope = self.of.scope(self._value)
        self.begin = partial(self.of.innermost.set, self.scope)

    def steps(self) -> Steps[T]:
        try:
            if not self.scope.is_open:  # the block is entered again
                self._prepare()
                self.begin()
            yield self._value
        finally:
            self.scope.is_open = False
            self.of.open_scope()

    def __call__(self, function: object) -> NoReturn:
        self.scope.is_open = False
        name = type(self).__name__
        raise TypeError(f"{name} is no decorator: it acts at once. Use `with {name}(...)`")


class HeldWhileTraced(Generic[T]):
    """What `torch.compile` traces instead of a `HeldAtOnce`, which no trace can make.

    The innermost scope gets another value until the block ends. Only the trace sees that,
    because of what a trace writes to objects, compiled code keeps what is there at its end.
    """

    def __init__(self, of: Scoped[T], value: T) -> None:
        self._scope = of.open_scope()
        self._before, self._value = self._scope.value, value
        self._scope.value = value

    def __enter__(self) -> T:
        return self._value

    def __exit__(self, *error: object) -> None:
        self._scope.value = self._before


def _open(scope: Scope[T]) -> Scope[T]:
    while not scope.is_open:
        assert scope.outer is not None  # the outermost scope does not end
        scope = scope.outer
    return scope


def _outermost(default: T, innermost: "ContextVar[Scope[T] | None]") -> Any:
    """Return the scope around all others, with an attribute `innermost`.

    The attribute is the innermost scope of the context that reads it, and the outermost
    scope itself where no other has begun: it is what `ContextVar.get(default)` returns of
    it. `torch.compile` cannot trace a call of `ContextVar.get`, but it reads an attribute
    that C code gives. So compiled code looks at each call whether the value is still the
    one with which it was compiled.
    """
    made = type("Outermost", (Scope,), {"innermost": property(innermost.get)})
    return made(default, None)
