"""A value that holds until its scope ends, in whatever order and thread scopes end.

Generators may end in another order than they began, and in another thread or context when
they are finalised there. So a context variable alone is not enough: to put back the old
value would undo what others have set since. Here every scope knows whether it is still
open, and the value is that of the innermost open scope.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Generic, NoReturn, TypeVar

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
        self._default = default
        self.innermost: ContextVar[Scope[T] | None] = ContextVar(name, default=None)

    def get(self) -> T:
        scope = self.innermost.get()
        if scope is None:
            return self._default
        if scope.is_open:
            return scope.value
        self.innermost.set(_open(scope))
        return self.get()

    def all(self) -> list[T]:
        """Return the values of all open scopes of this context, the innermost first."""
        found: list[T] = []
        scope: Scope[T] | None = self.innermost.get()
        while scope is not None:
            if scope.is_open:
                found.append(scope.value)
            scope = scope.outer
        return found

    def scope(self, value: T) -> Scope[T]:
        """Return a scope that has not begun."""
        return Scope(value, _open(self.innermost.get()))

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


class HeldAtOnce(Block[T]):
    """A block whose value holds as soon as the block is made, with or without `with`.

    The constructor calls `prepare` last, and then `begin` in a `try` that ends the scope,
    because a signal may come as soon as the value holds. If a signal comes between the
    constructor and the `with` block, the value holds as after the call alone.
    """

    begin: Callable[[], object]  # C code

    def prepare(self, of: "Scoped[T]", value: T) -> None:
        self._of, self._value = of, value
        self.scope = of.scope(value)
        self.begin = partial(of.innermost.set, self.scope)

    def steps(self) -> Steps[T]:
        try:
            if not self.scope.is_open:  # the block is entered again
                self.prepare(self._of, self._value)
                self.begin()
            yield self._value
        finally:
            self.scope.is_open = False

    def __call__(self, function: object) -> NoReturn:
        self.scope.is_open = False
        name = type(self).__name__
        raise TypeError(f"{name} is no decorator: it acts at once. Use `with {name}(...)`")


def _open(scope: Scope[T] | None) -> Scope[T] | None:
    while scope is not None and not scope.is_open:
        scope = scope.outer
    return scope
