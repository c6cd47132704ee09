"""One call of a known op: its operands, and its inferred type.

Operands are the tensors among the arguments and, where an op takes numbers as values, the
numbers that belong to mesh axes (`numbers.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
from torch import Tensor

from placements._torch import NO_DEFAULT, SlotData
from placements.inference.flows.random import refuse_own_generator
from placements.inference.nested import NESTS, leaves, mapped
from placements.inference.number_operands import chosen_by, number_operand
from placements.inference.numbers import RANK_NUMBERS, RankNumber, numbers_in
from placements.inference.op import SETTINGS, UNREAD, Op
from placements.inference.parts import written_over
from placements.inference.signature import Signature, Slot, bind, defaults
from placements.inference.templates import Pattern
from placements.inference.terms import Operand, Refusal
from placements.runtime import tags
from placements.runtime.callsite import name_of
from placements.runtime.describe import described
from placements.runtime.errors import refused_call, type_or_error
from placements.runtime.state import current
from placements.types.mesh import Mesh
from placements.types.tensor import LEAF, TensorType

# A tensor, or a number that stands for one.
Thing: TypeAlias = Tensor | RankNumber

_COUNTS_PADDING = (
    "the size of a dim with rows of padding counts them too; the rows that are meant are "
    "those of the mask, valid.sum()"
)


class Call:
    """A known op, its overloads, and whether this form of it writes its first argument."""

    __slots__ = (
        "choices", "in_place", "met", "op", "reads_floats", "roles", "signatures",
        "sizes_alone", "takes_mesh", "takes_shared", "takes_sizes",
    )  # fmt: skip

    def __init__(
        self,
        op: Op,
        in_place: bool,
        overloads: Sequence[Sequence[SlotData]],
        is_method: bool = False,
        converts: bool = False,
    ) -> None:
        self.op = op
        self.in_place = in_place
        self.signatures = [
            Signature(_named(op, slots), is_method, converts) for slots in overloads
        ]
        names = {slot.name for signature in self.signatures for slot in signature.slots}
        self.roles = {name: _role(op, name) for name in sorted(names | SETTINGS)}
        chosen = ("choice", "subscript")
        self.choices = [name for name, role in self.roles.items() if role in chosen]
        self.met: set[tuple[int, ...]] = set()  # hashes of the types of its calls
        # Whether it takes sizes, and no other numbers.
        self.sizes_alone = "size" in self.roles.values() and all(
            self.roles[slot.name] == "size" or slot.kind.removesuffix("?") in _NO_NUMBERS
            for signature in self.signatures
            for slot in signature.slots
        )
        self.reads_floats = op.reads_floats
        self.takes_mesh = "mesh" in op.takes
        self.takes_shared = "shared" in op.takes
        # Whether a number that belongs to an axis may be a size, or choose elements.
        self.takes_sizes = not {"size", "choice", "subscript"}.isdisjoint(
            self.roles.values()
        )


# Kinds of slots that take no number.
_NO_NUMBERS = frozenset(
    {"Tensor", "bool", "dtype", "device", "layout", "memory_format", "Generator"}
)


def _named(op: Op, slots: Sequence[SlotData]) -> tuple[Slot, ...]:
    """Return the slots of an overload, with the table's names for them."""
    names = ["input" if slot[0] == "self" else slot[0] for slot in slots]
    if "input" not in names and "tensor" in names:
        names[names.index("tensor")] = "input"
    return tuple(
        Slot(op.other_names.get(name, name), own, kind, default, default is NO_DEFAULT, by)
        for name, (own, kind, default, by) in zip(names, slots, strict=True)
    )


def _role(op: Op, slot: str) -> str | None:
    """Return the role of a slot; None if the table does not say it."""
    if slot in SETTINGS:
        return "flag"
    return "unread" if slot in UNREAD else op.roles.get(slot, op.roles.get("*"))


class UnknownForm(Exception):  # noqa: N818 - turned into an error at the boundary
    """The arguments fit no overload of the op."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, in order of appearance."""
    for arg in value if value.__class__ is tuple else (value,):
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, NESTS):
            yield from (leaf for leaf in leaves(arg) if isinstance(leaf, Tensor))


def operands_in(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, NESTS):
        yield from (leaf for leaf in leaves(value) if isinstance(leaf, Operand))


def changed(change: Callable[[Any], Any], arg: Any) -> Any:
    """Return the argument with each value in it changed; most arguments hold no others."""
    return mapped(change, arg) if isinstance(arg, NESTS) else change(arg)


def _seen(arg: Any, operands: Iterator[Operand]) -> Any:
    """Return the argument with operands for tensors, and numbers for those of numpy."""

    def seen(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return next(operands)
        return cast(Any, leaf).item() if isinstance(leaf, np.generic) else leaf

    return changed(seen, arg)


def _with_operands(value: Any, operands: Sequence[Operand]) -> Any:
    """Return the value with each operand replaced by the one in its position."""
    return changed(lambda x: operands[x.position] if isinstance(x, Operand) else x, value)


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
        self.things: list[Thing] = list(tensors_in((*args, *kwargs.values())))
        self.bound: dict[str, Any] = {}
        self.is_bound = False

    @property
    def tensors(self) -> list[Tensor]:
        return [thing for thing in self.things if isinstance(thing, Tensor)]

    def infer(self, pattern: Pattern | None = None) -> Any:
        """Return the type of the result, or of each result; Refusal if there is none."""
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
        args = [_seen(arg, left) for arg in self.args]
        kwargs = {name: _seen(arg, left) for name, arg in self.kwargs.items()}
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
        self.is_bound = True

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
        """Return the value if its role takes it; numbers of axes become operands."""
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
        """Make the number one more operand of the call."""
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

    def typed(
        self, operands: Sequence[Operand], sized: Callable[[Any], Any] | None = None
    ) -> Any:
        """Return what the op's flow says of these operands, with the other arguments.

        `sized` puts others in the place of numbers that are sizes.
        """
        op = self.call.op
        slots = {
            slot: _with_operands(value, operands)
            for slot, value in self.bound.items()
            if slot not in SETTINGS
        }
        if sized is not None:
            roles = self.call.roles
            slots |= {s: sized(value) for s, value in slots.items() if roles[s] == "size"}
        first: tuple[Any, ...] = (self.mesh,) if self.call.takes_mesh else ()
        if self.call.takes_shared:
            slots["shared"] = current.shared_axes
        found = self._by_choices(op.flow(op, *first, **slots))
        if self.bound.get("requires_grad"):
            # Nobody says yet what the gradient of a new leaf is, so it is no constant.
            found = found.with_fresh(LEAF)
        if self.call.in_place or self.bound.get("inplace"):
            return written_over(operands[0], found)
        return found

    def _by_choices(self, found: Any) -> Any:
        """Apply the numbers that belong to axes and choose what comes out."""
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
