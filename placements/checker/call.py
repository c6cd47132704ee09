"""One call of a known op: its operands, its inferred type, or the error that refuses it.

Operands are the tensors among the arguments and, where an op takes numbers as values, the
numbers that belong to mesh axes (`numbers.py`).
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

from torch import Tensor

from placements.checker.arguments import (
    Call,
    operands_in,
    seen_by_inference,
    tensors_in,
    with_operands,
)
from placements.checker.backward import advice_on_gradient
from placements.checker.trial import tried
from placements.inference import padding
from placements.inference.fixes import MOST, Fix, fixes, pad_advice, repeat_fix
from placements.inference.flows.losses import MEAN, mean_fix
from placements.inference.flows.random import refuse_own_generator
from placements.inference.number_operands import chosen_by, number_operand
from placements.inference.numbers import (
    RANK_NUMBERS,
    RankNumber,
    numbers_in,
    shown,
)
from placements.inference.op import SETTINGS
from placements.inference.signature import bind, defaults
from placements.inference.templates import Pattern
from placements.inference.terms import Operand, Refusal
from placements.runtime import tags
from placements.runtime.callsite import located, name_of, names_in_call
from placements.runtime.describe import described
from placements.runtime.errors import PlacementError, mismatch, refused_call, type_or_error
from placements.runtime.forgotten import any_questions, asked_before
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

    def infer(self, pattern: Pattern | None = None) -> Any:
        """The type of the result, or of each of several; Refusal if there is none."""
        self.operands = [
            _operand(tensor, self.mesh, self.where, k)
            for k, tensor in enumerate(self.tensors)
        ]
        self._bind()
        found = self._inferred(self.operands)
        if pattern is not None:
            pattern.learn(self.typed, self.operands)
        return found

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
            if slot == "generator" and value is not None and self.call.takes_shared:
                refuse_own_generator(current.shared_axes)
            if role is None or role == "unread":
                del self.bound[slot]
            else:
                self.bound[slot] = self._by_role(slot, role, value)
        self._is_bound = True

    def _refuse_unless_default(self, slot: str, value: Any) -> None:
        usual = defaults(self.call.signatures, slot)
        plain = not isinstance(value, Operand) and value.__class__ not in RANK_NUMBERS
        if plain and any(value is d or value == d for d in usual):
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

    def error(self, refusal: Refusal, func: Any) -> PlacementError:
        """The error for a refused call of `func`."""
        things = self.things
        named = names_in_call(self.where, self.args, self.kwargs)
        written = [
            named(thing) if isinstance(thing, Tensor) else thing.facts.origin
            for thing in things
        ]
        names = [name or self._slot_of(k) for k, name in enumerate(written)]
        guilty = self._guilty(refusal)
        # An operand that is written is not to be changed by a fix.
        kept = 1 if self.call.in_place else 0
        # Fixes must not divide by what a number forgets, so they are tried as typed.
        offered: list[Fix] = []
        # Else the call itself is wrong, or a gradient comes too early to be converted here.
        if self._is_bound and not _advice_on_gradients(things):
            given = (func, self.args, self.kwargs, self.operands)
            infer = tried(self.call.op, self.typed, *given)
            offered = fixes(infer, self.operands, names, refusal, kept)
            offered = [*repeat_fix(infer, self.operands, names), *offered][:MOST]
            if refusal.reason == MEAN and self.bound.get("reduction") == "mean":
                offered = [*self._mean_fix(names), *offered][:MOST]
        return mismatch(
            located(self.where),
            names[guilty] if names else self.where,
            refusal.axis,
            refusal.expected or "another type",
            self._actual(refusal, guilty) if things else "refused",
            rule=refusal.reason,
            operands=[
                described(thing, operand.type, name)
                if isinstance(thing, Tensor)
                else shown(thing)
                for thing, operand, name in zip(things, self.operands, written, strict=True)
            ],
            fixes=offered,
            advice=_about_operands(things) or pad_advice(refusal) if not offered else "",
            branch=asked_before(refusal.axis) if any_questions() else "",
        )

    def _mean_fix(self, names: Sequence[str]) -> list[Fix]:
        """The sum of the losses of all ranks over the count of all, if that is accepted."""
        summed = {**self.bound, "reduction": "sum"}
        plain = {k: v for k, v in summed.items() if not isinstance(v, Operand)}
        usual = {slot: defaults(self.call.signatures, slot) for slot in plain}
        said = {slot: v for slot, v in plain.items() if v not in usual[slot]}
        try:
            total = self.call.op.flow(self.call.op, **summed)
        except Refusal:
            return []
        return mean_fix(self.where, total, self.operands, names, plain, said)

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
            return self.typed(operands)
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
                    return self.typed(own)
                except Refusal:
                    pass
            raise

    def typed(self, operands: Sequence[Operand]) -> Any:
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


def _operand(tensor: Tensor, mesh: Mesh, where: str, position: int) -> Operand:
    known = tags.get(tensor)
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


def _about_operands(things: Sequence[Thing]) -> str:
    for thing in things:
        if not isinstance(thing, Tensor) and "P" in dict(thing.facts.letters).values():
            return (
                "a size of this rank's piece is a summand of the size over all ranks: "
                "global_size(x, dim), or global_mean(total, count, axes)"
            )
    return _advice_on_gradients(things)


def _advice_on_gradients(things: Sequence[Thing]) -> str:
    return next(filter(None, (advice_on_gradient(thing) for thing in things)), "")


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
