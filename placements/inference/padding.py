"""Pure: what becomes of rows of padding in an op.

Rows of padding go where their dim goes. What they hold is known if the op makes it known
(a product with zero is zero); else it may be anything. They may be summed over if they
hold zero, and selected away by a mask that holds False there; an op may never look along
a dim that has them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from placements.inference.rules import LINEAR, MULTILINEAR, NONLINEAR, Linearity
from placements.inference.terms import Contract, Label, Operand, Refusal, Scattered, Term
from placements.types.axis import Shard
from placements.types.padding import Pads, Validity
from placements.types.tensor import ZERO, TensorType

# What the rows of padding of each term hold -> what those of the result hold.
AtPads = Callable[[Sequence[int | None]], int | None]

SUMMED = "rows of padding that do not hold zero would be summed or counted with the others"
CHANGED = "the op changes elements before it sums them, so zero may not stay zero"
ALONG = "the op looks along a dim with rows of padding, and would take them for valid rows"
SELECTED = "the mask does not say that rows of padding are left out"
WRITTEN = (
    "an in-place op cannot change what is known of rows of padding: other names for the "
    "same memory would not know"
)
ROWS_LEFT = "the op takes some rows of a dim that has rows of padding; narrow it before"
RESHAPED = "a reshape that mixes rows of padding with other dims; split the dim first"

MASKED = "rows of padding that hold zero"
NO_PADS = "no rows of padding in this dim"


@dataclass
class _Group:
    """Terms with the same rows of padding, by place: what they hold there."""

    operand: Operand
    pads: Pads
    held: dict[int, int | None] = field(default_factory=lambda: dict[int, int | None]())


def result_pads(
    linearity: Linearity,
    terms: Sequence[Term],
    result: TensorType,
    adds_number: bool,
    at_pads: AtPads | None,
) -> tuple[Pads, ...]:
    """Return the rows of padding of an op's result; Refusal if they would count."""
    groups: dict[tuple[Validity, tuple[Label, ...]], _Group] = {}
    for place, term in enumerate(terms):
        for pads in term.operand.type.pads:
            labels = tuple(term.labels[dim] for dim in pads.dims)
            key = _named_by_cuts(term, pads, labels, result), labels
            group = groups.setdefault(key, _Group(term.operand, pads))
            if place in group.held:
                raise padding_refusal(ALONG, term.operand, pads, NO_PADS)
            group.held[place] = pads.holds
    found: list[Pads] = []
    for (validity, labels), group in groups.items():
        held = [
            group.held.get(k, 0 if term.operand.type.fresh == ZERO else None)
            for k, term in enumerate(terms)
        ]
        kept = tuple(label for label in labels if isinstance(label, int))
        if len(kept) == len(labels):
            if any(len(_sizes(terms, label)) > 1 for label in kept):
                raise padding_refusal(ROWS_LEFT, group.operand, group.pads, NO_PADS)
            holds = at_pads(held) if at_pads else None
            if not at_pads:
                holds = _held(linearity, terms, held, adds_number)
            found.append(Pads(validity, kept, holds))
        elif all(isinstance(label, int | Contract) for label in labels):
            _check_sum(linearity, terms, held, labels, group)
        elif all(isinstance(label, Scattered) for label in labels):
            _check_selected(terms, held, group)
        else:
            raise padding_refusal(ALONG, group.operand, group.pads, NO_PADS)
    return tuple(found)


def _sizes(terms: Sequence[Term], label: int) -> set[int]:
    """Return how many rows the dims with that label have; an index may address fewer."""
    return {
        size
        for term in terms
        for own, size in zip(term.labels, term.operand.shape, strict=True)
        if own == label
    }


def padding_refusal(reason: str, operand: Operand, pads: Pads, expected: str) -> Refusal:
    return Refusal(reason, None, operand, expected, pads=pads)


def _named_by_cuts(
    term: Term, pads: Pads, labels: Sequence[Label], result: TensorType
) -> Validity:
    """Return the mask, or the mask of a piece where the result forgets the cut."""
    validity = pads.validity
    for dim, label in zip(pads.dims, labels, strict=True):
        for axis, extent in term.operand.type.cuts(dim):
            if isinstance(label, int) and not isinstance(result.get(axis), Shard):
                validity = validity.piece(axis, extent)
    return validity


def _held(
    linearity: Linearity,
    terms: Sequence[Term],
    held: Sequence[int | None],
    adds_number: bool,
) -> int | None:
    """Return zero, or None for anything: sums of zeros and products with one are zero."""
    zeros = [x == 0 for x, t in zip(held, terms, strict=True) if not t.is_control]
    if linearity is LINEAR and zeros and all(zeros) and not adds_number:
        return 0
    return 0 if linearity is MULTILINEAR and any(zeros) else None


def _check_sum(
    linearity: Linearity,
    terms: Sequence[Term],
    held: Sequence[int | None],
    labels: Sequence[Label],
    group: _Group,
) -> None:
    summed = {label for label in labels if isinstance(label, Contract)}
    zeros = [
        x == 0
        for x, term in zip(held, terms, strict=True)
        if not term.is_control and summed & set(term.labels)
    ]
    enough = any(zeros) if linearity is MULTILINEAR else all(zeros) and bool(zeros)
    if not enough or linearity is NONLINEAR:
        reason = CHANGED if enough else SUMMED
        raise padding_refusal(reason, group.operand, group.pads, MASKED)


def _check_selected(
    terms: Sequence[Term], held: Sequence[int | None], group: _Group
) -> None:
    """Refuse a selection whose mask, or only tensor, is not False at padding."""
    selects = [k for k, term in enumerate(terms) if term.is_control] or [0]
    if not any(held[k] == 0 and k in group.held for k in selects):
        raise padding_refusal(
            SELECTED, group.operand, group.pads, "a mask that is False there"
        )


def first_rows(input: Operand, dim: int, count: object) -> Operand:
    """Return the operand without the rows of padding behind its first `count` rows."""
    if not isinstance(count, int):
        return input
    left = tuple(
        pads
        for pads in input.type.pads
        if pads.dims != (dim,)
        or pads.validity.first is None
        or not 0 <= count <= pads.validity.first
    )
    return replace(input, type=input.type.with_pads(left))


def viewed(input: Operand, view: Callable[[Pads], Pads | None]) -> tuple[Pads, ...]:
    """Return the rows of padding after a view of them; Refusal if it cannot be said."""
    found: list[Pads] = []
    for pads in input.type.pads:
        seen = view(pads)
        if seen is None:
            raise padding_refusal(RESHAPED, input, pads, NO_PADS)
        found.append(seen)
    return tuple(found)


def written_in_place(target: Operand, found: TensorType) -> TensorType:
    """Return the type after an in-place op, which may not change what padding holds."""
    old = {(p.validity, p.dims): p.holds for p in target.type.pads}
    for pads in found.pads:
        held = old.get((pads.validity, pads.dims), -1)
        if held is not None and held != pads.holds:
            raise padding_refusal(WRITTEN, target, pads, "the result of the plain op")
    new = {(p.validity, p.dims) for p in found.pads}
    for pads in target.type.pads:
        # What the op forgot (`addmm_` with beta=0) may hold anything now.
        if pads.holds is not None and (pads.validity, pads.dims) not in new:
            raise padding_refusal(WRITTEN, target, pads, "the result of the plain op")
    return found.with_pads(target.type.pads)


# What an op makes of zeros, where its linearity does not say: zeros alone give zero; any
# zero gives zero; True and False change places.
KEEPS, ABSORBS, FLIPS = "keeps", "absorbs", "flips"


def elementwise(
    zeros: str, terms: Sequence[Term], arguments: Sequence[object]
) -> AtPads | None:
    """Return what an elementwise op does to padding; None: what its linearity says."""
    if zeros == ABSORBS:
        return lambda held: 0 if 0 in held else None
    if zeros == KEEPS and not any(isinstance(a, int | float) and a for a in arguments):
        return lambda held: 0 if all(x == 0 for x in held) else None
    if zeros == FLIPS and terms[0].operand.is_bool:
        return lambda held: None if held[0] is None else 1 - held[0]
    return None


def same(held: Sequence[int | None]) -> int | None:
    """Keep what is known: the elements are what they were."""
    return held[0]


def chosen(value_if_true: object, value_if_false: object) -> AtPads:
    """`where`: terms are the branches that are tensors, then the condition."""

    def at_pads(held: Sequence[int | None]) -> int | None:
        *tensors, condition = held
        left = iter(tensors)
        branches = [
            next(left) if isinstance(b, Operand) else _constant(b)
            for b in (value_if_true, value_if_false)
        ]
        if branches[0] == branches[1]:
            return branches[0]
        if condition is None:
            return None
        return branches[0 if condition else 1]

    return at_pads


def _constant(value: object) -> int | None:
    """Return a number that rows of padding may be known to hold: a whole one, or zero."""
    if isinstance(value, int):
        return int(value)
    return 0 if isinstance(value, float) and not value else None


def filled(input: Operand, value: object) -> AtPads:
    """`masked_fill`: terms are the input, a value that is a tensor, then the mask."""
    choose = chosen(value, input)

    def at_pads(held: Sequence[int | None]) -> int | None:
        first, *values, mask = held
        return choose([*values, first, mask])

    return at_pads


def cast(held: Sequence[int | None]) -> int | None:
    """Keep zero and one, which are themselves in every dtype."""
    return held[0] if held[0] in (0, 1) else None


def divided(linearity: Linearity, divisors: Sequence[Operand]) -> AtPads | None:
    """Forget a quotient at padding: zero divided by what may be zero is no number."""
    if linearity is LINEAR and any(divisor.type.pads for divisor in divisors):
        return lambda held: None
    return None


def averaged(input: Operand, dims: Sequence[int]) -> AtPads | None:
    """Forget what is known: the mean of no rows is no number."""
    if all(input.shape[dim] for dim in dims):
        return None
    return lambda held: None


def in_shape_of(input: Operand, holds: int | None = None) -> tuple[Pads, ...]:
    """Return the rows of padding of new numbers in the shape of a tensor."""
    return tuple(Pads(pads.validity, pads.dims, holds) for pads in input.type.pads)


def times_mask(input: Operand) -> tuple[Pads, ...]:
    """Return the rows of padding of a tensor whose elements are kept, scaled or zeroed."""
    return tuple(
        Pads(pads.validity, pads.dims, 0 if pads.holds == 0 else None)
        for pads in input.type.pads
    )


def require_whole(input: Operand, dim: int) -> None:
    """Refuse rows of padding in `dim`, along which an op looks."""
    for pads in input.type.pads:
        if dim % input.ndim in pads.dims:
            raise padding_refusal(ALONG, input, pads, NO_PADS)


def ignored(
    scores: Operand, target: Operand, classes: int, ignore_index: int
) -> tuple[Operand, Operand]:
    """Return a loss and its classes without the rows of padding whose class it ignores."""
    for pads in target.type.pads:
        if pads.holds != ignore_index:
            continue
        dims = tuple(d + (d >= classes and scores.ndim > 1) for d in pads.dims)
        target = _without(target, pads.validity, pads.dims)
        scores = _without(scores, pads.validity, dims)
    return scores, target


def _without(x: Operand, validity: Validity, dims: tuple[int, ...]) -> Operand:
    left = tuple(p for p in x.type.pads if (p.validity, p.dims) != (validity, dims))
    return replace(x, type=x.type.with_pads(left))
