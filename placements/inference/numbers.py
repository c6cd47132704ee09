"""Python numbers that belong to mesh axes: a rank, an offset, the size of a piece.

While checking is on, the rank on an axis is a number that is Varying there, and the size
of a dim that is cut is Partial: this rank's summand of the size over all ranks. Arithmetic
keeps what is known, by the rules for tensors; what no rule allows becomes Varying, since a
number by itself does no harm. An op that takes such a number as a value, or chooses rows
by it, is then checked like one that takes a tensor.

A comparison gives a plain bool, since Python and torch take nothing else. Such a question
is told to a listener, because types do not follow the answer. `int(n)` and `float(n)` would
give a plain number that no rule knows again, so the listener may refuse them.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias, cast

from placements.inference.nested import NESTS, leaves
from placements.inference.rules import LINEAR, MULTILINEAR, NONLINEAR, Linearity, join
from placements.types.index import Cuts

# The dtype of an operand that is such a number.
NUMBER = "number"


@dataclass(frozen=True)
class Facts:
    """What is known of a number: its letter on each axis on which ranks differ.

    `counts_padding`: the size of a dim that has rows of padding. `cuts`: how the dim is cut
    of which it is the size, outermost first; a multiple of a size has the multiples of the
    pieces, and so has a quotient if every piece can be divided.
    """

    letters: tuple[tuple[str, str], ...]
    origin: str
    counts_padding: bool = False
    cuts: Cuts = ()
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Asked for by every key that holds such a number; cuts are left to the comparison.
        object.__setattr__(self, "_hash", hash((self.letters, self.origin)))

    def __hash__(self) -> int:
        return self._hash

    def letter(self, axis: str | None) -> str:
        return next((x for a, x in self.letters if a == axis), "R")


NOTHING = Facts((), "")


class FactsIdentity:
    """Stands for equal facts in keys: code of C compares it."""

    __slots__ = ("facts",)

    def __init__(self, facts: Facts) -> None:
        self.facts = facts


def facts_of(value: object) -> Facts:
    """Return what is known of a number; a plain one is equal on all ranks."""
    return value.facts if isinstance(value, RankInt | RankFloat) else NOTHING


def belonging(value: Any, facts: Facts) -> Any:
    """Return the number with these facts; itself if there are none or it is no number."""
    if not (facts.letters or facts.counts_padding) or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return RankInt(value, facts)
    return RankFloat(value, facts) if isinstance(value, float) else value


def plain(value: Any) -> Any:
    """Return the value without axes, told to nobody; itself if it has none."""
    if isinstance(value, RankInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, RankFloat) else value


class Listener:
    """Whoever is told of questions that a plain value answers: `runtime/forgotten.py`.

    `ordered` is asked before two numbers are ordered, and `made_plain` before `int(n)` or
    `float(n)` gives the axes up. Both may refuse.
    """

    told: "Callable[[RankNumber, str, Any], None] | None" = None
    ordered: "Callable[[RankNumber, Any], None] | None" = None
    made_plain: "Callable[[RankNumber, str], None] | None" = None


listener = Listener()


def tell(number: Any, question: str, answer: Any) -> Any:
    """Return a plain answer, of which the listener is told."""
    if listener.told is not None:
        listener.told(number, question, answer)
    return answer


def _made_plain(number: Any, kind: str) -> Any:
    if listener.made_plain is not None:
        listener.made_plain(number, kind)
    return plain(number)


# Python's operator -> its sign, and how its result depends on the two numbers; a
# quotient is linear in the numerator, for a given divisor.
_OPERATORS: dict[str, tuple[str, Linearity | None]] = {
    "add": ("+", LINEAR), "sub": ("-", LINEAR), "mul": ("*", MULTILINEAR),
    "truediv": ("/", None), "floordiv": ("//", NONLINEAR), "mod": ("%", NONLINEAR),
    "pow": ("**", NONLINEAR), "lshift": ("<<", NONLINEAR), "rshift": (">>", NONLINEAR),
    "and_": ("&", NONLINEAR), "or_": ("|", NONLINEAR), "xor": ("^", NONLINEAR),
}  # fmt: skip


@cache
def _letter(name: str, left: str, right: str) -> str:
    linearity = _OPERATORS[name][1]
    found = join(linearity, [left, right]) if linearity else join(LINEAR, [left], [right])
    return found.gives or "V"


def _combined(name: str, left: Any, right: Any) -> Any:
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return NotImplemented
    value = getattr(operator, name)(plain(left), plain(right))
    one, two = facts_of(left), facts_of(right)
    if name in ("add", "sub") and not (one.letters and two.letters):
        # Zero may be added to a summand (`sum` starts with it), another number not.
        given, number = (one, right) if one.letters else (two, left)
        letters = tuple((axis, "V" if number else x) for axis, x in given.letters)
    else:
        axes = dict.fromkeys(axis for axis, _ in (*one.letters, *two.letters))
        letters = tuple(
            (axis, _letter(name, one.letter(axis), two.letter(axis))) for axis in axes
        )
    origin = f"{one.origin or left} {_OPERATORS[name][0]} {two.origin or right}"
    padding = one.counts_padding or two.counts_padding
    cuts = _multiplied(one, right) or _multiplied(two, left) if name == "mul" else ()
    if name == "floordiv":
        cuts = _divided(one, right)
        whole = {axis for axis, _ in cuts}
        letters = tuple((axis, "P" if axis in whole else x) for axis, x in letters)
    return belonging(value, Facts(letters, origin, padding, cuts))


def _multiplied(size: Facts, times: Any) -> Cuts:
    if times.__class__ is not int or times < 1:
        return ()
    return tuple((axis, extent.scaled(times)) for axis, extent in size.cuts)


def _divided(size: Facts, by: Any) -> Cuts:
    """Return the cuts of `size // by`: where nothing is left over, the quotients add up."""
    if by.__class__ is not int or by < 1:
        return ()
    parts = ((axis, extent.divided(by)) for axis, extent in size.cuts)
    cuts = tuple((axis, part) for axis, part in parts if part is not None)
    return cuts if len(cuts) == len(size.cuts) else ()


def _each_own(numbers: Iterable[Any], origin: str) -> Facts:
    """Return what is known of a number that each rank makes of its own numbers."""
    letters = {axis: "V" for x in numbers for axis, _ in facts_of(x).letters}
    return Facts(tuple(letters.items()), origin)


_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _compared(name: str) -> Callable[[Any, Any], Any]:
    compare, sign = getattr(operator, name), _COMPARISONS[name]

    def compared(self: Any, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        if listener.ordered is not None and name not in ("eq", "ne"):
            listener.ordered(self, other)
        answer = compare(plain(self), plain(other))
        return tell(self, f"{sign} {facts_of(other).origin or '...'}", answer)

    return compared


def _forward(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: _combined(name, self, other)


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    return lambda self, other: _combined(name, other, self)


def _made_of_own(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes another number, which is each rank's own."""

    def method(self: Any, *digits: Any) -> Any:
        return self._changed(change(plain(self), *digits))

    return method


class _Belongs:
    """What numbers of both kinds share."""

    facts: Facts
    key: tuple[FactsIdentity, type, float] | None = None  # made when it is first asked for

    def __new__(cls, value: Any = 0, facts: Facts | None = None) -> Any:
        # Code that asks a number for its class (`statistics`) calls it with a number alone.
        kind: Any = int if issubclass(cls, int) else float
        if facts is None:
            return kind(value)
        made = kind.__new__(cls, value)
        made.facts = facts
        return made

    def __neg__(self) -> Any:
        return belonging(-plain(self), replace(self.facts, cuts=()))

    def __pos__(self) -> Any:
        return self

    conjugate = __pos__
    real = numerator = property(__pos__)

    def as_integer_ratio(self) -> Any:
        above, below = plain(self).as_integer_ratio()
        return self._changed(above), self._changed(below)

    def __pow__(self, other: Any, modulus: Any = None) -> Any:
        if modulus is None:
            return _combined("pow", self, other)
        given = self, other, modulus
        value = cast(Any, pow)(*map(plain, given))
        return belonging(value, _each_own(given, self.facts.origin))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __bool__(self) -> bool:
        return tell(self, "is not 0", bool(plain(self)))

    def __hash__(self) -> int:
        tell(self, "as a key", plain(self))
        return hash(plain(self))

    def __int__(self) -> int:
        return int(_made_plain(self, "int"))

    def __float__(self) -> float:
        return float(_made_plain(self, "float"))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Call a function of numpy: a number keeps the axes, an array has none to keep."""
        result = getattr(ufunc, method)(*map(plain, inputs), **options)
        facts = _each_own(inputs, f"{ufunc.__name__}({self.facts.origin})")
        if isinstance(result, tuple):  # divmod
            return tuple(self._of_numpy(one, facts) for one in cast(Any, result))
        return self._of_numpy(result, facts)

    def _of_numpy(self, result: Any, facts: Facts) -> Any:
        number = result.item() if getattr(result, "ndim", None) == 0 else result
        if isinstance(number, int | float) and not isinstance(number, bool):
            return belonging(number, facts)
        answer = number if isinstance(number, bool) else plain(self)
        tell(self, f"in {facts.origin}", answer)
        return result

    def _changed(self, value: Any) -> Any:
        """Return another number, which each rank makes of its own."""
        return belonging(value, _each_own((self,), self.facts.origin))

    def __reduce__(self) -> tuple[Any, ...]:
        kind: type[int] | type[float] = int if isinstance(self, RankInt) else float
        return kind, (plain(self),)  # elsewhere it is any number

    def __deepcopy__(self, memo: object) -> Any:
        return self


for _name in _OPERATORS:
    _bare = _name.removesuffix("_")
    if _bare != "pow":  # which may have a third operand
        setattr(_Belongs, f"__{_bare}__", _forward(_name))
    setattr(_Belongs, f"__r{_bare}__", _reflected(_name))

for _change in (abs, operator.invert, round, math.ceil, math.floor, math.trunc):
    setattr(_Belongs, f"__{_change.__name__}__", _made_of_own(_change))

for _name in _COMPARISONS:
    setattr(_Belongs, f"__{_name}__", _compared(_name))


class RankInt(_Belongs, int):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A whole number that belongs to mesh axes; called as int, it makes a plain one."""

    def __index__(self) -> int:
        return self

    def bit_length(self) -> int:
        return self._changed(plain(self).bit_length())

    def bit_count(self) -> int:
        return self._changed(plain(self).bit_count())

    def to_bytes(self, *args: Any, **kwargs: Any) -> bytes:
        return tell(self, "as bytes", plain(self).to_bytes(*args, **kwargs))


class RankFloat(_Belongs, float):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A number that belongs to mesh axes; called as float, it makes a plain one."""

    def is_integer(self) -> bool:
        return tell(self, "is whole", plain(self).is_integer())

    def hex(self) -> str:
        return tell(self, "as hex()", plain(self).hex())


RankNumber: TypeAlias = RankInt | RankFloat

RANK_NUMBERS = frozenset({RankInt, RankFloat})  # a set: the hot path asks by class


def numbers_in(value: Any) -> Iterator[RankNumber]:
    """Yield the numbers that belong to axes, among arguments."""
    if value.__class__ in RANK_NUMBERS:
        yield value
    elif isinstance(value, NESTS):
        yield from (leaf for leaf in leaves(value) if leaf.__class__ in RANK_NUMBERS)


def shown(number: RankNumber) -> str:
    """`shape[0] = 3 {tp:P}`, for messages."""
    letters = ", ".join(f"{axis}:{letter}" for axis, letter in number.facts.letters)
    return f"{number.facts.origin} = {plain(number)} {{{letters}}}"
