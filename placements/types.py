"""What a tensor is across the ranks of one mesh axis: the five types, and their text.

Values only: no tensors, no meshes. What the types mean is executable in `meaning.py`;
the type of the gradient is the table in `duals.py`.
"""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from placements.errors import ArgumentError
from placements.extents import Even, Extent, Folded, Padded, Ragged, ZigZag


class AxisType:
    """The type of a tensor on one mesh axis."""

    __slots__ = ()
    letter: str

    def __repr__(self) -> str:
        return self.letter


class _Single(AxisType):
    """A type without parameters: calling the class gives the one value."""

    __slots__ = ()
    _value: "AxisType | None" = None

    def __new__(cls) -> "_Single":
        if cls.__dict__.get("_value") is None:
            cls._value = super().__new__(cls)
        assert isinstance(cls._value, _Single)
        return cls._value

    def __reduce__(self) -> tuple[type[AxisType], tuple[()]]:
        return type(self), ()


class Replicate(_Single):
    """Equal values on all ranks, used differently on each."""

    __slots__ = ()
    letter = "R"


class Invariant(_Single):
    """Equal values on all ranks, and one computation that all ranks repeat."""

    __slots__ = ()
    letter = "I"


class Varying(_Single):
    """Unrelated values."""

    __slots__ = ()
    letter = "V"


class Partial(_Single):
    """The global value is the sum over ranks."""

    __slots__ = ()
    letter = "P"


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Shard(AxisType):
    """Pieces of one global tensor, concatenated along `dim` as `extent` says.

    Without an extent it says nothing of the pieces, and equals any Shard of that dim.
    """

    dim: int
    extent: Extent | None = None
    letter = "S"

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"Shard needs the number of a dim, got {self.dim!r}")
        if not isinstance(self.extent, Extent | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"the extent of Shard({self.dim}) must be Even, Padded, Ragged, "
                f"ZigZag or Folded, got {self.extent!r}"
            )

    def __repr__(self) -> str:
        if self.extent is None or self.extent.is_even:
            return f"S({self.dim})"
        return f"S({self.dim}, {self.extent!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shard):
            return NotImplemented
        if self.dim != other.dim:
            return False
        if self.extent is None or other.extent is None:
            return True
        return self.extent == other.extent

    def __hash__(self) -> int:
        return hash(self.dim)


R, I, V, P, S = Replicate(), Invariant(), Varying(), Partial(), Shard  # noqa: E741

BY_LETTER: dict[str, AxisType] = {t.letter: t for t in (R, I, V, P)}
WORDS: dict[str, str] = {
    t.letter: t.__name__ for t in (Replicate, Invariant, Varying, Partial, Shard)
}

# Where a type is expected the word itself will do (`{"tp": Partial}`), as in
# `spmd_types`, where the words are the values.
AxisTypeLike: TypeAlias = AxisType | type[AxisType] | str
TypesLike: TypeAlias = Mapping[str, AxisType | type[AxisType] | str]


def as_axis_type(like: object) -> AxisType:
    """An AxisType from one, from its class, or from its text."""
    if isinstance(like, AxisType):
        return like
    if isinstance(like, type) and issubclass(like, _Single) and like is not _Single:
        return like()
    if isinstance(like, str):
        return parse_axis_type(like)
    raise ArgumentError(
        f"a placement is R, I, V, P or S(dim) "
        f"(Replicate(), Invariant(), Varying(), Partial(), Shard(dim)), got {like!r}"
    )


_EXTENTS = {kind.__name__: kind for kind in (Even, Padded, Ragged, ZigZag, Folded)}
_WORD_OR_LETTER: dict[str, AxisType] = {
    **BY_LETTER,
    **{WORDS[letter]: t for letter, t in BY_LETTER.items()},
}


def parse_axis_type(text: str) -> AxisType:
    """`R`, `I`, `V`, `P`, `S(1)` or `S(1, Padded(5))`, as printed."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        return _axis_type_of(tree)
    except (SyntaxError, ValueError, TypeError, KeyError) as error:
        raise ArgumentError(
            f"{text!r} is not a placement; write R, I, V, P, S(dim) or "
            f"S(dim, extent) such as S(1, Padded(5))"
        ) from error


def _axis_type_of(node: ast.expr) -> AxisType:
    if isinstance(node, ast.Name):
        return _WORD_OR_LETTER[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if not node.args and not node.keywords:
            return _WORD_OR_LETTER[node.func.id]
        if node.func.id in ("S", "Shard") and not node.keywords:
            dim = ast.literal_eval(node.args[0])
            extent = _extent_of(node.args[1]) if len(node.args) == 2 else None
            return Shard(dim, extent)
    raise ValueError(ast.dump(node))


def _extent_of(node: ast.expr) -> Extent:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        raise ValueError(ast.dump(node))
    parts: list[Any] = [
        _extent_of(arg) if isinstance(arg, ast.Call) else ast.literal_eval(arg)
        for arg in node.args
    ]
    return _EXTENTS[node.func.id](*parts)


@dataclass(frozen=True)
class Described:
    """A tensor as it is printed: `f32[T=6, D=8]{dp:S(0), tp:P}`."""

    dtype: str
    sizes: tuple[int, ...]
    names: tuple[str | None, ...]
    types: Mapping[str, AxisType]

    def __str__(self) -> str:
        dims = ", ".join(
            f"{name}={size}" if name else str(size)
            for name, size in zip(self.names, self.sizes, strict=True)
        )
        return f"{self.dtype}[{dims}]{print_types(self.types)}"


_DESCRIBED = re.compile(r"\s*(\w+)\s*\[([^\]]*)\]\s*(\{.*\})\s*")


def parse_described(text: str) -> Described:
    """The inverse of printing: `f32[T=6, D=8]{dp:S(0), tp:P}`."""
    match = _DESCRIBED.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form f32[T=6, D=8]{{dp:S(0), tp:P}}")
    dtype, dims, types = match.groups()
    names: list[str | None] = []
    sizes: list[int] = []
    for dim in filter(None, (part.strip() for part in dims.split(","))):
        name, _, size = dim.rpartition("=")
        names.append(name or None)
        sizes.append(int(size))
    return Described(dtype, tuple(sizes), tuple(names), parse_types(types))


def print_types(types: Mapping[str, AxisType]) -> str:
    return "{" + ", ".join(f"{axis}:{t!r}" for axis, t in types.items()) + "}"


def parse_types(text: str) -> dict[str, AxisType]:
    """`{dp:S(0), tp:P}`, as printed (which is the syntax of a Python dict)."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        tree = None
    if not isinstance(tree, ast.Dict):
        raise ValueError(f"{text!r} is not of the form {{dp:S(0), tp:P}}")
    return {
        ast.unparse(axis): parse_axis_type(ast.unparse(t))
        for axis, t in zip(tree.keys, tree.values, strict=True)
        if axis is not None
    }
