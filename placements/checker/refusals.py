"""The error for a call that inference or torch refuses: who is to blame, and what mends it.

A fix is tried before it is offered: inference must take the changed operands, and torch the
changed pieces.
"""

import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from placements.checker.call import (
    Call,
    CallInference,
    Thing,
    changed,
    operands_in,
    tensors_in,
)
from placements.inference.fixes import MOST, Fix, fixes, pad_advice, repeat_fix
from placements.inference.flows.losses import MEAN, mean_fix
from placements.inference.numbers import numbers_in, shown
from placements.inference.signature import defaults
from placements.inference.terms import Operand, Refusal
from placements.runtime import tags
from placements.runtime.callsite import located, names_in_call
from placements.runtime.describe import described
from placements.runtime.dtensors import types_of_placements
from placements.runtime.errors import (
    PlacementError,
    held_as_dtensor,
    mismatch,
    refused_call,
)
from placements.runtime.forgotten import any_questions, asked_before
from placements.types.axis import WORDS, Shard
from placements.types.tensor import TensorType


def refused_by(refusal: Refusal, call: CallInference, func: Any) -> PlacementError:
    """Return the error for a call of `func` that inference refused."""
    things = call.things
    named = names_in_call(call.where, call.args, call.kwargs)
    written = [
        named(thing) if isinstance(thing, Tensor) else thing.facts.origin
        for thing in things
    ]
    names = [name or _slot_of(call, k) for k, name in enumerate(written)]
    guilty = _guilty(call, refusal)
    advice = _on_gradients(things)
    offered: list[Fix] = []
    # Else the call itself is wrong, or a gradient comes too early to be converted here.
    if call.is_bound and not advice:
        offered = _fixes(refusal, call, func, names)
    return mismatch(
        located(call.where),
        names[guilty] if names else call.where,
        refusal.axis,
        refusal.expected or "another type",
        _actual(call, refusal, guilty) if things else "refused",
        rule=refusal.reason,
        operands=[
            described(thing, operand.type, name)
            if isinstance(thing, Tensor)
            else shown(thing)
            for thing, operand, name in zip(things, call.operands, written, strict=True)
        ],
        fixes=offered,
        advice=_on_sizes(things) or advice or pad_advice(refusal) if not offered else "",
        branch=asked_before(refusal.axis) if any_questions() else "",
    )


# What torch raises if it does not like its arguments.
_LinAlgError: type[RuntimeError] = cast(Any, torch.linalg).LinAlgError
COMPLAINTS = (RuntimeError, IndexError, ValueError, ZeroDivisionError, _LinAlgError)


def refuse_pieces(error: Exception, where: str, arguments: Any) -> None:
    """Raise PlacementError where torch was given pieces that do not fit."""
    tensors = list(tensors_in(arguments))
    for tensor in tensors:
        if types_of_placements(tensor) is not None:
            raise held_as_dtensor(where, tensor) from error
    known = [tags.get(t) for t in tensors]
    cut = [k for k in known if k is not None and any(t.letter in "SVP" for t in k.types)]
    own_numbers = next(numbers_in(arguments), None) is not None
    if error.__class__ in COMPLAINTS and (cut or own_numbers):
        raise refused_call(
            where,
            f"torch does not take these pieces: {error}",
            rule="the sizes of a piece are not those of the whole",
            operands=[described(t, k) for t, k in zip(tensors, known, strict=True)],
        ) from error


def refuse_bools(where: str, tensor: Tensor, known: TensorType) -> None:
    """Raise PlacementError for a Partial of bools: the sum of two is no bool."""
    if tensor.dtype is not torch.bool:
        return
    for axis, t in known.items():
        if t.letter == "P":
            raise refused_call(
                where,
                f"the result is bool and Partial on axis {axis!r}",
                axis=axis,
                rule="a bool does not count how many ranks said yes",
                advice="sum whole numbers (dtype=torch.int64), all_reduce, then compare",
            )


def _fixes(
    refusal: Refusal, call: CallInference, func: Any, names: Sequence[str]
) -> list[Fix]:
    trial = _Trial(call, func)
    # An operand that is written is not to be changed by a fix.
    kept = 1 if call.call.in_place else 0
    found = fixes(trial, call.operands, names, refusal, kept)
    found = [*repeat_fix(trial, call.operands, names), *found]
    if refusal.reason == MEAN and call.bound.get("reduction") == "mean":
        found = [*_mean_fix(call, names), *found]
    return found[:MOST]


class _Trial:
    """Infers a call with other operands, and then runs it on tensors without memory.

    Some calls cannot run without values. For such a call inference alone decides. A fix
    must not divide by what a number forgets, so it is tried with numbers as typed.
    """

    def __init__(self, call: CallInference, func: Any) -> None:
        self._call, self._func = call, func

    @cached_property
    def _runs(self) -> bool:
        # Torch itself crashes in some ops if their tensors have no memory.
        no_memory = self._call.call.op.needs_memory
        return not no_memory and self._is_taken(self._call.operands)

    def __call__(self, operands: Sequence[Operand]) -> object:
        found = self._call.typed(operands)
        if self._runs and not self._is_taken(operands):
            raise ValueError("torch does not take these pieces")
        return found

    def _is_taken(self, operands: Sequence[Operand]) -> bool:
        left = iter(operands)

        def empty(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty(next(left).shape, dtype=leaf.dtype, device="meta")

        args = [changed(empty, arg) for arg in self._call.args]
        kwargs = {name: changed(empty, arg) for name, arg in self._call.kwargs.items()}
        try:
            with warnings.catch_warnings(action="ignore"):
                self._func(*args, **kwargs)
        except Exception:  # a trial that fails must not hide the refusal
            return False
        return True


def _mean_fix(call: CallInference, names: Sequence[str]) -> list[Fix]:
    """Return the sum of all ranks' losses over the count of all, if that is accepted."""
    op, summed = call.call.op, {**call.bound, "reduction": "sum"}
    plain = {k: v for k, v in summed.items() if not isinstance(v, Operand)}
    usual = {slot: defaults(call.call.signatures, slot) for slot in plain}
    said = {slot: v for slot, v in plain.items() if v not in usual[slot]}
    try:
        total = op.flow(op, **summed)
    except Refusal:
        return []
    return mean_fix(call.where, total, call.operands, names, plain, said)


def _slot_of(call: CallInference, position: int) -> str:
    """Return the slot of an operand, which stands for a name that the program lacks."""
    for slot, value in call.bound.items():
        found = list(operands_in(value))
        for k, operand in enumerate(found):
            if operand.position == position:
                return slot if isinstance(value, Operand) else f"{slot}[{k}]"
    return f"argument {position}"


def _guilty(call: CallInference, refusal: Refusal) -> int:
    """Return which operand to blame: a local size that is Partial, else the refused one."""
    for k, thing in enumerate(call.things):
        if not isinstance(thing, Tensor) and thing.facts.letter(refusal.axis) == "P":
            return k
    return refusal.operand.position if refusal.operand else 0


def _actual(call: CallInference, refusal: Refusal, guilty: int) -> str:
    found, thing = call.operands[guilty].type, call.things[guilty]
    if not isinstance(thing, Tensor) and thing.facts.counts_padding:
        return "the number of all rows"
    t = None if refusal.axis is None else found.by_axis.get(refusal.axis)
    if t is not None:
        return repr(t) if isinstance(t, Shard) else WORDS[t.letter]
    if refusal.index is not None:
        return f"an index ({found.index!r})"
    if refusal.pads is not None:
        return str(refusal.pads)
    return repr(found)


def _on_sizes(things: Sequence[Thing]) -> str:
    """Return what to do with a size of a piece that is taken for that of the whole."""
    for thing in things:
        if not isinstance(thing, Tensor) and "P" in dict(thing.facts.letters).values():
            return (
                "a size of this rank's piece is a summand of the size over all ranks: "
                "global_size(x, dim); as a count, global_mean(total, "
                "torch.ones_like(x).sum(), axes)"
            )
    return ""


def _on_gradients(things: Sequence[Thing]) -> str:
    """Return what to do before a gradient is used that the ranks did not sum yet."""
    for thing in things:
        known = (
            tags.get(thing)
            if isinstance(thing, Tensor) and tags.is_gradient(thing)
            else None
        )
        if known is not None and any(t.letter == "P" for t in known.types):
            return "reduce_gradients(module) after backward, before its use"
    return ""


def let_torch_say(
    call: Call, func: Any, where: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise torch's own error for a call that is refused: it says better what is wrong.

    Nothing is changed where torch takes the call: an in-place op gets a copy.
    """
    if call.op.needs_memory:
        return  # torch does not look whether the shapes fit
    writes = call.in_place or kwargs.get("inplace")
    mine = (args[0].detach().clone(), *args[1:]) if writes and args else args
    try:
        func(*mine, **kwargs)
    except (RuntimeError, IndexError, ValueError) as torchs:
        refuse_pieces(torchs, where, (args, kwargs))
        raise


def unknown_form(where: str, error: Exception) -> PlacementError:
    """Return the error for arguments that torch takes and the table does not know."""
    return refused_call(
        where,
        f"called in a form that the table does not know: {error}",
        advice="pass the arguments as the torch documentation names them",
    )
