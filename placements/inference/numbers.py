"""Python numbers that belong to mesh axes: a rank, an offset, the size of a piece.

While checking is on, the rank on an axis is a number that is Varying there, and the size
of a dim that is cut is Partial: this rank's summand of the size over all ranks. Arithmetic
keeps what is known, by the rules for tensors; what no rule allows becomes Varying, since a
number by itself does no harm. An op that takes such a number as a value, or chooses rows
by it, is then checked like one that takes a tensor.
"""

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from placements.inference.combine import combine
from placements.inference.padding import same
from placements.inference.rules import LINEAR, MULTILINEAR, NONLINEAR, Linearity, join
from placements.inference.terms import Operand, Term
from placements.types.axis import BY_LETTER, AxisType, Shard, V
from placements.types.index import Cuts
from placements.types.mesh import Mesh
from placements.types.tensor import MADE, TensorType, make

# The dtype of an operand that is such a number.
NUMBER = "number"


@dataclass(frozen=True)
class Facts:
    """What is known of a number: its letter on each axis on which ranks differ.

    `counts_padding`: the size of a dim that has rows of padding. `cuts`: how the dim is cut
    of which it is the size, outermost first; a multiple of a size has the multiples of the
    pieces.
    """

    letters: tuple[tuple[str, str], ...]
    origin: str
    counts_padding: bool = False
    cuts: Cuts = ()

    def letter(self, axis: str | None) -> str:
        return next((x for a, x in self.letters if a == axis), "R")


NOTHING = Facts((), "")


def facts_of(value: object) -> Facts:
    """What is known of a number; a plain one is equal on all ranks."""
    return value.facts if isinstance(value, RankInt | RankFloat) else NOTHING


def belonging(value: Any, facts: Facts) -> Any:
    """The number with these facts; itself if there are none, or if it is no number."""
    if not (facts.letters or facts.counts_padding) or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return RankInt(value, facts)
    return RankFloat(value, facts) if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    if isinstance(value, RankInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, RankFloat) else value


# Python's operator -> its sign, and how its result depends on the two numbers; a
# quotient is linear in the numerator, for a given divisor.
_OPERATORS: dict[str, tuple[str, Linearity | None]] = {
    "add": ("+", LINEAR), "sub": ("-", LINEAR), "mul": ("*", MULTILINEAR),
    "truediv": ("/", None), "floordiv": ("//", NONLINEAR), "mod": ("%", NONLINEAR),
    "pow": ("**", NONLINEAR), "lshift": ("<<", NONLINEAR), "rshift": (">>", NONLINEAR),
    "and_": ("&", NONLINEAR), "or_": ("|", NONLINEAR), "xor": ("^", NONLINEAR),
}  # fmt: skip


def _letter(name: str, left: str, right: str) -> str:
    _, linearity = _OPERATORS[name]
    if linearity is None:
        return join(LINEAR, [left], [right]).gives or "V"
    return join(linearity, [left, right]).gives or "V"


def _combined(name: str, left: Any, right: Any) -> Any:
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return NotImplemented
    value = getattr(operator, name)(_plain(left), _plain(right))
    one, two = facts_of(left), facts_of(right)
    if name in ("add", "sub") and not (one.letters and two.letters):
        # Zero may be added to a summand (`sum` starts with it), another number not.
        given, number = (one, right) if one.letters else (two, left)
        letters = given.letters if not number else _all_varying(given)
    else:
        axes = dict.fromkeys(axis for axis, _ in (*one.letters, *two.letters))
        letters = tuple(
            (axis, _letter(name, one.letter(axis), two.letter(axis))) for axis in axes
        )
    origin = f"{one.origin or left} {_OPERATORS[name][0]} {two.origin or right}"
    padding = one.counts_padding or two.counts_padding
    cuts = _multiplied(one, right) or _multiplied(two, left) if name == "mul" else ()
    return belonging(value, Facts(letters, origin, padding, cuts))


def _multiplied(size: Facts, times: Any) -> Cuts:
    if times.__class__ is not int or times < 1:
        return ()
    return tuple((axis, extent.scaled(times)) for axis, extent in size.cuts)


def _all_varying(facts: Facts) -> tuple[tuple[str, str], ...]:
    return tuple((axis, "V") for axis, _ in facts.letters)


def _forward(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: _combined(name, self, other)


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: _combined(name, other, self)


class _Belongs:
    """What numbers of both kinds share."""

    facts: Facts

    def __neg__(self) -> Any:
        return belonging(-_plain(self), replace(self.facts, cuts=()))

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self._changed(abs(_plain(self)))

    def __invert__(self) -> Any:
        return self._changed(~_plain(self))

    def __round__(self, digits: Any = None) -> Any:
        return self._changed(round(_plain(self), digits))

    def __ceil__(self) -> Any:
        return self._changed(math.ceil(_plain(self)))

    def __floor__(self) -> Any:
        return self._changed(math.floor(_plain(self)))

    def __trunc__(self) -> Any:
        return self._changed(math.trunc(_plain(self)))

    @property
    def real(self) -> Any:
        return self

    @property
    def numerator(self) -> Any:
        return self

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def _changed(self, value: Any) -> Any:
        """Another number that each rank makes of its own."""
        return belonging(value, Facts(_all_varying(self.facts), self.facts.origin))

    def __reduce__(self) -> tuple[Any, ...]:
        kind: type[int] | type[float] = int if isinstance(self, RankInt) else float
        return kind, (_plain(self),)  # elsewhere it is any number

    def __deepcopy__(self, memo: object) -> Any:
        return self


for _name in _OPERATORS:
    _bare = _name.removesuffix("_")
    setattr(_Belongs, f"__{_bare}__", _forward(_name))
    setattr(_Belongs, f"__r{_bare}__", _reflected(_name))


class RankInt(_Belongs, int):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A whole number that belongs to mesh axes."""

    def __new__(cls, value: int, facts: Facts) -> "RankInt":
        made = super().__new__(cls, value)
        made.facts = facts
        return made


class RankFloat(_Belongs, float):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A number that belongs to mesh axes."""

    def __new__(cls, value: float, facts: Facts) -> "RankFloat":
        made = super().__new__(cls, value)
        made.facts = facts
        return made


RankNumber: TypeAlias = RankInt | RankFloat

# A set, because the hot path asks by class.
RANK_NUMBERS = frozenset({RankInt, RankFloat})


def numbers_in(value: Any) -> Iterator[RankNumber]:
    """Numbers that belong to axes, among arguments, slices and lists included."""
    if value.__class__ in RANK_NUMBERS:
        yield value
    elif isinstance(value, slice):
        bounds = cast(Any, value)
        yield from numbers_in((bounds.start, bounds.stop, bounds.step))
    elif isinstance(value, dict):
        yield from numbers_in(tuple(cast(Any, value).values()))
    elif isinstance(value, list | tuple):
        for item in cast(Any, value):
            yield from numbers_in(item)


def number_operand(
    number: RankNumber, mesh: Mesh, position: int, *, forgotten: bool = False
) -> Operand:
    """The number as inference sees it; `forgotten`: as each rank's own."""
    letters = {axis: number.facts.letter(axis) for axis in mesh.axes}
    if any(axis not in mesh.sizes for axis, _ in number.facts.letters):
        letters = dict.fromkeys(mesh.axes, "V")  # it belongs to another presentation
    if forgotten:
        letters = {axis: "R" if x == "R" else "V" for axis, x in letters.items()}
    types = {axis: BY_LETTER[letter] for axis, letter in letters.items()}
    # Nobody declared it, so what is made of it and of factories is open to declaration.
    return Operand(make(mesh, types, fresh=MADE), (), NUMBER, position)


def shown(number: RankNumber) -> str:
    """`shape[0] = 3 {tp:P}`, for messages."""
    letters = ", ".join(f"{axis}:{letter}" for axis, letter in number.facts.letters)
    return f"{number.facts.origin} = {_plain(number)} {{{letters}}}"


def chosen_by(found: TensorType, number: RankNumber) -> TensorType:
    """The type of rows that were chosen by a number: on its axes each rank's own.

    Raises Refusal for an Invariant or a Partial, as for any choice that ranks make alone.
    """
    facts = number.facts
    if any(axis not in found.mesh.sizes for axis, _ in facts.letters):
        # It belongs to another presentation of the ranks, and may differ on all of them.
        facts = replace(facts, letters=tuple((axis, "V") for axis in found.mesh.axes))
        number = RankInt(int(number), facts)
    if not any(axis in found for axis, _ in facts.letters):
        return found
    if found.fresh is not None:
        own: dict[str, AxisType] = {
            axis: V if facts.letter(axis) != "R" else t for axis, t in found.items()
        }
        return make(found.mesh, own, found.index, MADE).with_pads(found.pads)
    dims = [t.dim for t in found.types if isinstance(t, Shard)]
    ndim = 1 + max([0, *dims, *(d for pads in found.pads for d in pads.dims)])
    rows = Operand(found, (1,) * ndim, "float64", 0)
    choice = number_operand(number, found.mesh, 0, forgotten=True)
    terms = [Term(rows, tuple(range(ndim))), Term(choice, (), is_control=True)]
    return combine(LINEAR, terms, at_pads=same).with_index(found.index)


def filled_with(mesh: Mesh, number: RankNumber) -> TensorType:
    """The type of a tensor that a factory fills with the number."""
    types = {axis: BY_LETTER[number.facts.letter(axis)] for axis in mesh.axes}
    return make(mesh, types, fresh=MADE)
