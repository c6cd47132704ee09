"""A property that is computed once."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

T = TypeVar("T")


class kept(Generic[T]):  # noqa: N801 - it is used like `property`
    """As `functools.cached_property`, without the lock that torch.compile does not trace.

    What is traced is not kept: the sizes in it may be symbols of the trace.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self._name = make.__name__
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, instance: None, owner: Any = None) -> "kept[T]": ...
    @overload
    def __get__(self, instance: object, owner: Any = None) -> T: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self
        value = self._make(instance)
        if not torch.compiler.is_dynamo_compiling():
            instance.__dict__[self._name] = value
        return value
