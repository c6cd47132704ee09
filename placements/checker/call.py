"""One call of a known op: its operands, its inferred type, or the error that refuses it.

Operands are the tensors among the arguments and, where an op takes numbers as values, the
numbers that belong to mesh axes (`numbers.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from torch import Tensor

from placements.checker.lookup import Call
from placements.inference import padding
from placements.inference.fixes import Fix, fixes, pad_advice
from placements.inference.numbers import (
    RANK_NUMBERS,
    RankNumber,
    chosen_by,
    number_operand,
    numbers_in,
    shown,
)
from placements.inference.op import SETTINGS
from placements.inference.signature import bind, defaults
from placements.inference.terms import Operand, Refusal
from placements.runtime import tags
from placements.runtime.callsite import located, name_of
from placements.runtime.describe import described
from placements.runtime.errors import PlacementError, mismatch, refused_call, type_or_error
from placements.runtime.state import current
from placements.types.axis import WORDS, Shard
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

# A tensor, or a number that stands for one.
Thing: TypeAlias = Tensor | RankNumber

_COUNTS_PADDING = (
    "the size of a dim with rows of padding counts them too; the rows that are meant are "
    "those of the mask, valid.sum()"
)

Infer: TypeAlias = Callable[[Sequence[Operand]], Any]


class UnknownForm(Exception):  # noqa: N818 - turned into an error at the boundary
    """The arguments fit no overload of the op."""


class CallInference:
    """What is known of one call before it runs."""

    def __init__(
        self,
        call: Call,
        where: str,
        mesh: Mesh,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.call, self.where, self.args, self.kwargs = call, where, args, kwargs
        self.mesh = mesh
        self.things: list[Thing] = list(tensors_in((args, tuple(kwargs.values()))))
        self.bound: dict[str, Any] = {}
        self._is_bound = False

    @property
    def tensors(self) -> list[Tensor]:
        return [thing for thing in self.things if isinstance(thing, Tensor)]

    def infer(self) -> Any:
        """The type of the result, or of each of several; Refusal if there is none."""
        tensors = self.tensors
        types = [tags.get(tensor) for tensor in tensors]
        self.operands = [
            _operand(tensor, known, self.mesh, self.where, k)
            for k, (tensor, known) in enumerate(zip(tensors, types, strict=True))
        ]
        self._bind()
        return self._inferred(self.operands)

    def _bind(self) -> None:
        """Put every argument into its slot, and see that the row says what it is there."""
        left = iter(self.operands)
        args = [seen_by_inference(arg, left) for arg in self.args]
        kwargs = {name: seen_by_inference(arg, left) for name, arg in self.kwargs.items()}
        op = self.call.op
        bound = bind(self.call.signatures, args, kwargs)
        if bound is None:
            raise UnknownForm(f"{op.name} has no overload for these arguments")
        self.bound = dict(bound)
        for slot, value in bound.items():
            role = self.call.roles[slot]
            if role is None:
                self._refuse_unless_default(slot, value)
            if role is None or role == "unread":
                del self.bound[slot]
            else:
                self.bound[slot] = self._by_role(slot, role, value)
        self._is_bound = True

    def _refuse_unless_default(self, slot: str, value: Any) -> None:
        usual = defaults(self.call.signatures, slot)
        if not isinstance(value, Operand) and any(value is d or value == d for d in usual):
            return
        raise Refusal(
            f"the table of ops does not say what the argument {slot!r} does to placements",
            operand=value if isinstance(value, Operand) else None,
            expected=f"{self.call.op.name} without {slot}=",
        )

    def _by_role(self, slot: str, role: str, value: Any) -> Any:
        """The value, if its role takes it; numbers that belong to axes become operands."""
        if role in ("value", "control"):
            return self._with_numbers(value)
        if role == "subscript":
            return value  # its flow looks at every class of subscript
        if role in ("size", "dtype") and isinstance(value, Operand):
            return value
        for item in operands_in(value):
            raise Refusal(
                f"the argument {slot!r} takes plain numbers or settings, and a tensor "
                "there may differ by rank: read it first, x.item()",
                operand=item,
                expected="a Python number",
            )
        for number in numbers_in(value) if role not in ("size", "choice") else ():
            axis = next((a for a, _ in number.facts.letters), None)
            raise Refusal(
                f"the argument {slot!r} must be the same on all ranks, and this number "
                "belongs to an axis",
                axis, self._number(number), "a plain number",
            )  # fmt: skip
        return value

    def _number(self, number: RankNumber) -> Operand:
        """The number as one more operand of the call."""
        operand = number_operand(number, self.mesh, len(self.operands))
        self.things.append(number)
        self.operands.append(operand)
        return operand

    def _with_numbers(self, value: Any) -> Any:
        if value.__class__ in RANK_NUMBERS:
            operand = self._number(cast(RankNumber, value))
            if value.facts.counts_padding:
                raise Refusal(_COUNTS_PADDING, None, operand, "the number of valid rows")
            return operand
        if isinstance(value, list | tuple):
            return [self._with_numbers(item) for item in cast(Any, value)]
        return value

    def error(self, refusal: Refusal) -> PlacementError:
        """The error for a refused call."""
        things = self.things
        names = [
            (name_of(thing) if isinstance(thing, Tensor) else thing.facts.origin)
            or self._slot_of(k)
            for k, thing in enumerate(things)
        ]
        guilty = self._guilty(refusal)
        # An operand that is written is not to be changed by a fix.
        kept = 1 if self.call.in_place else 0
        # Fixes must not divide by what a number forgets, so they are tried as typed.
        offered: list[Fix] = []
        if self._is_bound:  # else the call itself is wrong, whatever its operands are
            offered = fixes(self._typed, self.operands, names, refusal, kept)
        return mismatch(
            located(self.where),
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

    def _slot_of(self, position: int) -> str:
        """The name of the slot that an operand is in, for want of a name in the program."""
        for slot, value in self.bound.items():
            found = list(operands_in(value))
            for k, operand in enumerate(found):
                if operand.position == position:
                    return slot if isinstance(value, Operand) else f"{slot}[{k}]"
        return f"argument {position}"

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
        op = self.call.op
        slots = {
            slot: with_operands(value, operands)
            for slot, value in self.bound.items()
            if slot not in SETTINGS
        }
        first: tuple[Any, ...] = (self.mesh,) if self.call.takes_mesh else ()
        if self.call.takes_shared:
            slots["shared"] = current.shared_axes
        found = self._by_choices(op.flow(op, *first, **slots))
        if self.bound.get("requires_grad"):
            # Nobody says yet what the gradient of a new leaf is, so it is no constant.
            found = found.as_leaf()
        if self.call.in_place or self.bound.get("inplace"):
            return _written(operands[0], found)
        return found

    def _by_choices(self, found: Any) -> Any:
        """What numbers that belong to axes make of the result, where they choose."""
        for slot in self.call.choices:
            for number in numbers_in(self.bound.get(slot)):
                found = _each(found, number)
        return found


def _operand(
    tensor: Tensor, known: TensorType | None, mesh: Mesh, where: str, position: int
) -> Operand:
    if known is None or known.fresh is not None:
        known = type_or_error(tensor, where)
    dtype = str(tensor.dtype).removeprefix("torch.")
    operand = Operand(known, tuple(tensor.shape), dtype, position)
    if known.mesh is mesh or known.is_number:
        return operand
    if known.mesh.num_ranks != mesh.num_ranks:
        raise refused_call(
            where,
            f"{name_of(tensor) or 'a tensor'} got its type on {known.mesh!r}, which has "
            f"other ranks than the current {mesh!r}",
            rule="a type says nothing on a mesh of other ranks",
            operands=[described(tensor, known)],
            advice="make the tensor under the current mesh",
        )
    return operand


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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments, slices included, in order of appearance."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, slice):
        bounds = cast(Any, value)
        yield from tensors_in((bounds.start, bounds.stop, bounds.step))
    elif isinstance(value, list | tuple):
        for item in cast(Any, value):
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(tuple(cast(Any, value).values()))


def seen_by_inference(arg: Any, operands: Iterator[Operand]) -> Any:
    """The argument as inference sees it: operands for tensors, numbers for numpy's."""
    if isinstance(arg, Tensor):
        return next(operands)
    if isinstance(arg, np.generic):
        return cast(Any, arg).item()
    if isinstance(arg, list | tuple):
        items = cast(Any, arg)
        seen = [seen_by_inference(item, operands) for item in items]
        return seen if items.__class__ is list else tuple(seen)
    if isinstance(arg, slice):
        bounds = cast(Any, arg)
        return slice(
            *(
                seen_by_inference(b, operands)
                for b in (bounds.start, bounds.stop, bounds.step)
            )
        )
    return arg


def operands_in(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, slice):
        bounds = cast(Any, value)
        yield from operands_in((bounds.start, bounds.stop, bounds.step))
    elif isinstance(value, list | tuple):
        for item in cast(Any, value):
            yield from operands_in(item)


def with_operands(value: Any, operands: Sequence[Operand]) -> Any:
    """The value with each operand replaced by the one in its position."""
    if isinstance(value, Operand):
        return operands[value.position]
    if isinstance(value, list | tuple):
        items = cast(Any, value)
        seen = [with_operands(item, operands) for item in items]
        return seen if items.__class__ is list else tuple(seen)
    if isinstance(value, slice):
        bounds = cast(Any, value)
        ends = (bounds.start, bounds.stop, bounds.step)
        return slice(*(with_operands(end, operands) for end in ends))
    return value
