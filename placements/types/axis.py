"""What a tensor is across the ranks of one mesh axis: the five types, and their duals.

There are only values here, no tensors and no meshes. `meaning.py` says what the types
mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from placements.types.extents import Extent


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

    A Shard without an extent says nothing of the pieces, and equals any Shard of that dim.
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


def print_types(types: Mapping[str, AxisType]) -> str:
    """`{dp:S(0), tp:P}`, which `text.py` can parse."""
    return "{" + ", ".join([f"{axis}:{t!r}" for axis, t in types.items()]) + "}"


# value -> gradient. A Shard's gradient is the same Shard: same dim, same extent.
DUALS: dict[str, AxisType] = {"R": P, "I": I, "V": V, "P": R}

REASONS: dict[str, str] = {
    "R": "each rank used the value in its own way, so its gradient is one summand",
    "I": "all ranks did the same computation, so all hold the same whole gradient",
    "V": "the value is the rank's own, and so is its gradient",
    "S": "each rank holds the gradient of its own piece",
    "P": "every summand enters the sum with weight one, so all get the same gradient",
}


def dual(axis_type: AxisType) -> AxisType:
    """AxisType -> the AxisType of the gradient."""
    if isinstance(axis_type, Shard):
        return axis_type
    return DUALS[axis_type.letter]
