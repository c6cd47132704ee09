"""`On`: the placement of a tensor in a signature, next to its jaxtyping shape.

    def combine(rows_MD: Annotated[Float[Tensor, "M D"], On(ep=V)], ...)

An `On` is inert: it is a value that `typed` reads. This file knows annotations only, not
how a call is checked.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from placements.types.axis import AxisType, AxisTypeLike
from placements.types.errors import ArgumentError
from placements.types.text import as_axis_type

_REFERENCE = re.compile(r"\{([\w.]+)\}")


@dataclass(frozen=True, repr=False)
class Reference:
    """`"{self.layout.tokens}"`: an attribute of an argument, read at each call."""

    path: str

    def __repr__(self) -> str:
        return f"'{{{self.path}}}'"

    def read(self, arguments: Mapping[str, Any]) -> Any:
        first, *rest = self.path.split(".")
        if first not in arguments:
            raise ArgumentError(
                f"{self!r} refers to {first!r}, which is no argument of the function; "
                f"its arguments are {', '.join(arguments)}"
            )
        value = arguments[first]
        for name in rest:
            if not hasattr(value, name):
                raise ArgumentError(f"{self!r}: {type(value).__name__} has no {name!r}")
            value = getattr(value, name)
        return value


@dataclass(frozen=True, repr=False)
class Variable:
    """`"t"`: any type, but the same one wherever the name stands in a call."""

    name: str

    def __repr__(self) -> str:
        return repr(self.name)


AxisPattern = AxisType | Variable | Reference


class PadRows:
    """Says that a tensor may have rows of padding; without it none are taken.

    def route(x_TD: Annotated[TD, On(tp=R), PadRows], valid_T: Annotated[Mask, PadRows])
    """


class On:
    """What a tensor is on the named axes; on the others it may be anything.

    A value is a type (`S(0)`), a string that names a placement variable (`"t"`), or a
    reference to an attribute of an argument (`"{self.layout.tokens}"`). A reference alone,
    `On("{self.layout.tokens}")`, stands for a whole mapping.
    """

    __slots__ = ("axes", "whole")

    def __init__(
        self,
        types: Mapping[str, AxisTypeLike] | str | None = None,
        /,
        **axes: AxisTypeLike,
    ) -> None:
        self.whole: Reference | None = None
        if isinstance(types, str):
            match = _REFERENCE.fullmatch(types)
            if match is None:
                raise ValueError(
                    f"On({types!r}): a string alone must be a reference to a mapping, "
                    "such as '{self.layout.tokens}'"
                )
            self.whole = Reference(match[1])
            types = None
        given = {**(types or {}), **axes}
        self.axes: Mapping[str, AxisPattern] = {
            axis: _pattern(value) for axis, value in given.items()
        }

    def __repr__(self) -> str:
        parts = [repr(self.whole)] if self.whole else []
        parts += [f"{axis}={value!r}" for axis, value in self.axes.items()]
        return f"On({', '.join(parts)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, On):
            return NotImplemented
        return self._said() == other._said()

    def __hash__(self) -> int:
        return hash(self._said())

    def _said(self) -> tuple[object, ...]:
        """Return all that it says, to compare: `typing` keeps one of equal annotations.

        So extents count, although `S(1)` equals any Shard of that dim, and so does the
        order of the axes, which is that of the cuts.
        """
        extents = [getattr(value, "extent", None) for value in self.axes.values()]
        return self.whole, tuple(self.axes.items()), tuple(extents)

    def patterns(self, arguments: Mapping[str, Any]) -> dict[str, AxisType | Variable]:
        """axis -> type or variable, references read from the call's arguments."""
        found: dict[str, AxisType | Variable] = {}
        if self.whole is not None:
            mapping: Mapping[str, Any] = self.whole.read(arguments)
            found.update({axis: as_axis_type(t) for axis, t in mapping.items()})
        for axis, value in self.axes.items():
            found[axis] = (
                as_axis_type(value.read(arguments))
                if isinstance(value, Reference)
                else value
            )
        return found


def _pattern(value: AxisTypeLike) -> AxisPattern:
    if not isinstance(value, str):
        return as_axis_type(value)
    reference = _REFERENCE.fullmatch(value)
    if reference is not None:
        return Reference(reference[1])
    if value.isidentifier() and value.islower():
        return Variable(value)
    return as_axis_type(value)
