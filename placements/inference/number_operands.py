"""What is made of a number that belongs to mesh axes: one more operand of an op, a choice
of rows, or one of several numbers that Python chooses from.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from placements.inference.combine import combine
from placements.inference.nested import mapped
from placements.inference.numbers import (
    NUMBER,
    Facts,
    RankInt,
    RankNumber,
    belonging,
    facts_of,
    numbers_in,
    plain,
    tell,
)
from placements.inference.padding import same
from placements.inference.rules import LINEAR
from placements.inference.terms import Operand, Term
from placements.types.axis import BY_LETTER, AxisType, Shard, V
from placements.types.mesh import Mesh
from placements.types.tensor import MADE, TensorType, make


def number_operand(
    number: RankNumber, mesh: Mesh, position: int, *, forgotten: bool = False
) -> Operand:
    """Return the number as inference sees it; `forgotten`: as each rank's own."""
    letters = {axis: number.facts.letter(axis) for axis in mesh.axes}
    if any(axis not in mesh.sizes for axis, _ in number.facts.letters):
        letters = dict.fromkeys(mesh.axes, "V")  # it belongs to another presentation
    if forgotten:
        letters = {axis: "R" if x == "R" else "V" for axis, x in letters.items()}
    types = {axis: BY_LETTER[letter] for axis, letter in letters.items()}
    # Nobody declared it, so what is made of it and of factories is open to declaration.
    return Operand(make(mesh, types, fresh=MADE), (), NUMBER, position)


def chosen_by(found: TensorType, number: RankNumber) -> TensorType:
    """Return the type of rows that were chosen by a number: on its axes each rank's own.

    Raises Refusal for an Invariant or a Partial, as for any choice that ranks make alone.
    """
    facts = number.facts
    if any(axis not in found.mesh.sizes for axis, _ in facts.letters):
        # It belongs to another presentation of the ranks, and may differ on all of them.
        facts = replace(facts, letters=tuple((axis, "V") for axis in found.mesh.axes))
        number = RankInt(int(plain(number)), facts)
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


def is_either(one: Facts, two: Facts) -> bool:
    """Whether the larger of two numbers has the facts of both, whichever it is.

    Each rank's own numbers stay its own. Two summands may not be chosen from, since the
    largest sum is no sum of the largest summands, unless they are sizes of equal pieces.
    """
    if sorted(one.letters) != sorted(two.letters):
        return False
    is_own = all(letter == "V" for _, letter in one.letters)
    return is_own or bool(one.cuts and one.cuts == two.cuts)


def chosen_from(choose: Callable[[Iterable[Any]], Any], numbers: list[Any]) -> Any:
    """Return `max` or `min` of numbers: it differs by rank wherever one of them does.

    Python's own returns one of them, which says where it belongs and not where the others
    do: on one rank the size of a piece may be the larger, on another a plain number.
    """
    every = [facts_of(number) for number in numbers]
    if all(is_either(every[0], facts) for facts in every):
        return choose(numbers)
    axes = dict.fromkeys(axis for facts in every for axis, _ in facts.letters)
    named = [f.origin or repr(n) for f, n in zip(every, numbers, strict=True)]
    origin = f"{choose.__name__}({', '.join(named)})"
    padded = any(facts.counts_padding for facts in every)
    value = choose(map(plain, numbers))
    facts = Facts(tuple((axis, "V") for axis in axes), origin, padded)
    return belonging(int(value) if isinstance(value, bool) else value, facts)


def of_own(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Any:
    """Call a function of `math`: what it makes of such numbers is each rank's own.

    An answer that is a bool is told to the listener, as that of a comparison is.
    """
    given = list(numbers_in(args))
    letters = {axis: "V" for one in given for axis, _ in one.facts.letters}
    facts = Facts(tuple(letters.items()), f"{function.__name__}({given[0].facts.origin})")
    result = function(*(mapped(plain, arg) for arg in args), **options)
    if isinstance(result, bool):  # isclose, isnan
        return tell(given[0], f"in {facts.origin}", result)
    if isinstance(result, tuple):  # frexp, modf
        return tuple(belonging(one, facts) for one in cast(Any, result))
    return belonging(result, facts)
