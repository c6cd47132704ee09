"""What the annotations of a function say of its tensor arguments: dims and types."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from torch import nn

from placements.annotations import On, Variable
from placements.types import AxisType


@dataclass(frozen=True)
class Argument:
    """What an annotation says of a tensor argument."""

    name: str
    dims: tuple[str, ...]
    on: Mapping[str, AxisType | Variable]


def arguments_of(fn: Callable[..., Any]) -> list[Argument]:
    """The tensor arguments of a `@typed` function, from its annotations."""
    target: Any = fn.forward if isinstance(fn, nn.Module) else fn
    plain = inspect.unwrap(target)
    hints = get_type_hints(plain, include_extras=True) if inspect.isroutine(plain) else {}
    found: list[Argument] = []
    for name, hint in hints.items():
        if name == "return":
            continue
        if get_origin(hint) is not Annotated:
            continue
        shape, *marks = get_args(hint)
        dims = tuple(str(getattr(shape, "dim_str", "")).split())
        on: dict[str, AxisType | Variable] = {}
        for mark in marks:
            if isinstance(mark, On):
                on.update(mark.patterns({"self": fn}))
        if any(not (d.isidentifier() or d.isdigit()) for d in dims):
            raise ValueError(f"{name}: dims {dims} must be names or numbers")
        found.append(Argument(name, dims, on))
    if not found:
        raise ValueError(
            f"{fn!r} has no annotated tensor argument; write "
            'Annotated[Float[Tensor, "T D"], On(tp=S(0))]'
        )
    return found
