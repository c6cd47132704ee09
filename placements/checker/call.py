"""One call of a known op: its operands, its inferred type, or the error that refuses it.

Operands are the tensors among the arguments and, where an op takes numbers as values, the
numbers that belong to mesh axes (`numbers.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

from torch import Tensor

from placements.checker.lookup import Call
from placements.inference import padding
from placements.inference.fixes import fixes, pad_advice
from placements.inference.flows import elementwise
from placements.inference.flows import factories as create
from placements.inference.numbers import (
    RANK_NUMBERS,
    RankNumber,
    chosen_by,
    filled_with,
    number_operand,
    numbers_in,
    shown,
)
from placements.inference.op import Op
from placements.inference.terms import Operand, Refusal
from placements.runtime.callsite import caller, name_of
from placements.runtime.describe import described, dtype_name
from placements.runtime.errors import PlacementError, mismatch, type_or_error
from placements.runtime.mesh import checked_mesh
from placements.runtime.state import current
from placements.types.axis import WORDS, Shard
from placements.types.tensor import TensorType

# A tensor, or a number that stands for one.
Thing: TypeAlias = Tensor | RankNumber

# Flows whose numbers are values, like tensors without dims.
_TAKES_VALUES = frozenset(
    {
        elementwise.pointwise,
        elementwise.quotient,
        elementwise.where,
        elementwise.masked_fill,
        elementwise.fill,
    }
)

# Ops whose numbers choose elements, or count them: with another number, others come out.
_CHOOSES = frozenset(
    "__getitem__ __setitem__ narrow select split split_with_sizes tensor_split roll "
    "arange linspace tril triu topk kthvalue".split()
)

_COUNTS_PADDING = (
    "the size of a dim with rows of padding counts them too; the rows that are meant are "
    "those of the mask, valid.sum()"
)

# Other names that torch takes for an argument.
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "x2": "other"}

Infer: TypeAlias = Callable[[Sequence[Operand]], Any]


class CallInference:
    """What is known of one call before it runs."""

    def __init__(
        self, call: Call, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.call, self.where, self.args = call, where, args
        self.kwargs = {_ALIASES.get(name, name): a for name, a in kwargs.items()}
        self._values = call.op.flow in _TAKES_VALUES
        self.things: list[Thing] = list(self._things_in((args, kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        return [thing for thing in self.things if isinstance(thing, Tensor)]

    def infer(self) -> Any:
        """The type of the result, or of each of several; Refusal if there is none."""
        self.operands = [
            _operand(thing, self.where, k) for k, thing in enumerate(self.things)
        ]
        for thing, operand in zip(self.things, self.operands, strict=True):
            if not isinstance(thing, Tensor) and thing.facts.counts_padding:
                raise Refusal(_COUNTS_PADDING, None, operand, "the number of valid rows")
        return self._inferred(self.operands)

    def error(self, refusal: Refusal) -> PlacementError:
        """The error for a refused call."""
        things = self.things
        names = [
            (name_of(thing) if isinstance(thing, Tensor) else thing.facts.origin)
            or f"argument {k}"
            for k, thing in enumerate(things)
        ]
        guilty = self._guilty(refusal)
        # An operand that is written is not to be changed by a fix.
        kept = 1 if self.call.in_place else 0
        # Fixes must not divide by what a number forgets, so they are tried as typed.
        offered = fixes(self._typed, self.operands, names, refusal, kept)
        return mismatch(
            f"{self.where} at {caller()}",
            names[guilty] if names else self.where,
            refusal.axis,
            refusal.expected or "another type",
            self._actual(refusal, guilty) if things else "refused",
            rule=refusal.reason,
            operands=[
                described(thing, operand.type)
                if isinstance(thing, Tensor)
                else shown(thing)
                for thing, operand in zip(things, self.operands, strict=True)
            ],
            fixes=offered,
            advice=_about_sizes(things) or pad_advice(refusal) if not offered else "",
        )

    def _guilty(self, refusal: Refusal) -> int:
        """A size of a piece before the tensor that it is used with."""
        for k, thing in enumerate(self.things):
            if not isinstance(thing, Tensor) and thing.facts.letter(refusal.axis) == "P":
                return k
        return refusal.operand.position if refusal.operand else 0

    def _actual(self, refusal: Refusal, guilty: int) -> str:
        found, thing = self.operands[guilty].type, self.things[guilty]
        if not isinstance(thing, Tensor) and thing.facts.counts_padding:
            return "the number of all rows"
        if refusal.axis is not None and refusal.axis in found:
            t = found[refusal.axis]
            return repr(t) if isinstance(t, Shard) else WORDS[t.letter]
        if refusal.index is not None:
            return f"an index ({found.index!r})"
        if refusal.pads is not None:
            return str(refusal.pads)
        return repr(found)

    def _inferred(self, operands: Sequence[Operand]) -> Any:
        try:
            return self._typed(operands)
        except Refusal:
            # A number may always be taken as each rank's own.
            own = [
                number_operand(thing, operand.type.mesh, k, forgotten=True)
                if not isinstance(thing, Tensor)
                else operand
                for k, (thing, operand) in enumerate(
                    zip(self.things, operands, strict=True)
                )
            ]
            if own != list(operands):
                try:
                    return self._typed(own)
                except Refusal:
                    pass
            raise

    def _typed(self, operands: Sequence[Operand]) -> Any:
        """The op's flow as a function of its operands, other arguments given."""
        op, left = self.call.op, iter(operands)
        seen = tuple(self._with_operands(a, left) for a in self.args)
        named = {k: self._with_operands(a, left) for k, a in self.kwargs.items()}
        first: tuple[Any, ...] = (checked_mesh(),) if self.call.takes_mesh else ()
        if self.call.takes_shared:
            named["shared"] = current.shared_axes
        found = self._by_numbers(op.flow(op, *first, *seen, **named))
        if self.call.in_place or _asks_in_place(op, self.args, self.kwargs):
            return _written(operands[0], found)
        return found

    def _by_numbers(self, found: Any) -> Any:
        """What numbers that belong to axes make of the result."""
        op = self.call.op
        if op.name in _CHOOSES:
            for number in numbers_in((self.args, self.kwargs)):
                found = _each(found, number)
        elif op.flow is create.filled:
            value = self.kwargs.get("fill_value", self.args[-1] if self.args else None)
            if "full" in op.name and value.__class__ in RANK_NUMBERS:
                return filled_with(checked_mesh(), cast(RankNumber, value))
        return found

    def _things_in(self, value: Any) -> Iterator[Thing]:
        """The operands among arguments, in order of appearance."""
        if isinstance(value, Tensor) or (self._values and value.__class__ in RANK_NUMBERS):
            yield value
        elif isinstance(value, dict):
            yield from self._things_in(tuple(cast(Any, value).values()))
        elif isinstance(value, list | tuple):
            for item in cast(Any, value):
                yield from self._things_in(item)

    def _with_operands(self, arg: Any, operands: Any) -> Any:
        if isinstance(arg, Tensor) or (self._values and arg.__class__ in RANK_NUMBERS):
            return next(operands)
        if isinstance(arg, list | tuple):
            seen = [self._with_operands(a, operands) for a in cast(Any, arg)]
            return seen if isinstance(arg, list) else tuple(seen)
        return arg


def _operand(thing: Thing, where: str, position: int) -> Operand:
    if not isinstance(thing, Tensor):
        return number_operand(thing, checked_mesh(), position)
    found = type_or_error(thing, where)
    return Operand(found, tuple(thing.shape), dtype_name(thing), position)


def _each(found: Any, number: RankNumber) -> Any:
    if isinstance(found, TensorType):
        return chosen_by(found, number)
    return type(found)(_each(one, number) for one in found)


def _about_sizes(things: Sequence[Thing]) -> str:
    for thing in things:
        if not isinstance(thing, Tensor) and "P" in dict(thing.facts.letters).values():
            return (
                "a size of this rank's piece is a summand of the size over all ranks: "
                "global_size(x, dim), or global_mean(total, count, axes)"
            )
    return ""


def _asks_in_place(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """relu(x, inplace=True), relu(x, True), dropout(x, 0.5, True, True)."""
    if kwargs.get("inplace", False):
        return True
    # Activations take the flag second, dropout fourth; it is their only flag there.
    return (
        op.group in ("elementwise", "random") and len(args) in (2, 4) and args[-1] is True
    )


def _written(target: Operand, found: TensorType) -> TensorType:
    """An in-place op keeps the type of what it writes, unless it is fresh."""
    old = target.type
    if old.fresh is not None:
        return found
    if old.types == found.types and old.orders == found.orders:
        return padding.written(target, found)
    axis = next((a for a in old if old[a] != found[a]), None)
    raise Refusal(
        f"an in-place op cannot change a type, here to {found!r}: other names for the "
        "same memory would not know",
        axis,
        target,
        repr(found[axis]) if axis else repr(found),
        kind="policy",  # docs/decisions.md, 6: whatever else would be right
    )
