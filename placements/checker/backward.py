"""What the checker does where backward begins, and with gradients that it leaves.

Backward itself is not checked op by op: its types follow from the forward types. What is
checked is what enters it, and what comes out gets the type of a gradient.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from placements.checker.hooks import in_backward
from placements.inference.combine import as_numbers
from placements.inference.fixes import Fix, call_text, cost
from placements.inference.presentations import presented
from placements.inference.terms import Refusal
from placements.inference.transitions import find
from placements.runtime import tags
from placements.runtime.callsite import located, name_of
from placements.runtime.describe import described
from placements.runtime.errors import mismatch, refused_call, type_or_error, wrong_type
from placements.runtime.gradient_notes import note_of, put_note, reduced
from placements.runtime.gradient_watch import (
    check_noted,
    hooked_type,
    misfit,
    settle,
    watch,
)
from placements.runtime.state import observer
from placements.types.axis import BY_LETTER
from placements.types.tensor import ZERO, TensorType, from_factory
from placements.types.text import print_word

# Backward starts with the gradient 1.0 on every rank, which is a Replicate. That is the
# gradient of a Partial, and on an Invariant it is the same 1.0 that all ranks repeat.
# letter of the loss -> (why it is refused, the call and type that mend it)
LOSSES: dict[str, tuple[str, str, str] | None] = {
    "I": None,
    "P": None,
    "R": (
        "every rank would send back the whole gradient of one loss, and they are summed: "
        "n times too much",
        "convert",
        "I",
    ),
    "V": (
        "the ranks have losses of their own; if the loss is their sum, say so",
        "reinterpret",
        "P",
    ),
    "S": ("a loss is one number, not a piece of a tensor", "reinterpret", "V"),
}


def _check_loss(call: str, loss: Tensor) -> None:
    known = type_or_error(loss, call)
    for axis, t in known.items():
        verdict = LOSSES[t.letter]
        if verdict is None:
            continue
        reason, cast, letter = verdict
        dst = BY_LETTER[letter]
        row = find(cast, t, dst)
        fixes: list[Fix] = []
        if row is not None:
            text = call_text(cast, name_of(loss) or "loss", axis, t, dst)
            fixes.append(Fix(text, *cost(row, axis)))
        raise wrong_type(
            call, loss, known, axis, "Invariant or Partial", print_word(t),
            unnamed="loss", rule=reason, fixes=fixes,
        )  # fmt: skip


def check_gradient(call: str, known: TensorType, seed: Tensor, *of: Tensor) -> None:
    """Raise PlacementError unless `seed` is typed as the gradient of such a value."""
    expected, actual = known.dual(), as_numbers(type_or_error(seed, call))
    if actual.is_number and actual.fresh is not None:
        actual = from_factory(expected.mesh, actual.fresh)  # it is that on any mesh
    elif actual.mesh != expected.mesh:
        try:
            actual = presented(actual, expected.mesh)
        except Refusal as refusal:
            raise refused_call(
                call,
                f"{name_of(seed) or 'gradient'} lives on {actual.mesh!r}, expected "
                f"{expected.mesh!r}: {refusal.reason}",
                name=name_of(seed) or "gradient",
                axis=refusal.axis,
                expected=repr(expected.mesh),
                actual=repr(actual.mesh),
                rule="the gradient of a value has the dual of its type",
                operands=[*map(described, of), described(seed)],
                advice="reinterpret_mesh(gradient, mesh)",
            ) from None
    for axis, t in expected.items():
        # One number on every rank is any type but a Partial, which it would count n times.
        fits = actual.is_number and (t.letter != "P" or actual.fresh == ZERO)
        if actual[axis] != t and not fits:
            raise wrong_type(
                call, seed, actual, axis, repr(t), repr(actual[axis]), unnamed="gradient",
                rule="the gradient of a value has the dual of its type",
                operands=[*map(described, of), described(seed)],
            )  # fmt: skip


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [v for v in value or () if isinstance(v, Tensor)]


def _check_start(call: str, outputs: Sequence[Tensor], seeds: Any) -> None:
    given = _tensors(seeds)
    for k, output in enumerate(outputs):
        if k < len(given):
            known = type_or_error(output, call)
            check_gradient(call, known, given[k], output)
        else:
            _check_loss(call, output)


def _backward(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    seeds = kwargs.get("gradient", kwargs.get("grad_tensors"))
    outputs = _tensors(args[0] if args else kwargs.get("tensors", kwargs.get("self")))
    if len(args) > 1:
        seeds = args[1]
    _check_start("backward", outputs, seeds)
    watcher = observer()
    if watcher is not None:
        watcher.backward()
    with in_backward(mode, outputs):
        return func(*args, **kwargs)


def _grad(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    outputs = _tensors(args[0] if args else kwargs["outputs"])
    inputs = _tensors(args[1] if len(args) > 1 else kwargs["inputs"])
    seeds = args[2] if len(args) > 2 else kwargs.get("grad_outputs")
    if kwargs.get("is_grads_batched") or (len(args) > 6 and args[6]):
        raise refused_call(
            "autograd.grad",
            "is_grads_batched=True adds a dim to every gradient, which types do not know",
            name="is_grads_batched",
            rule="the gradient of a value has the dual of its type",
            advice="call autograd.grad once for each gradient",
        )
    _check_start("autograd.grad", outputs, seeds)
    for x in inputs:
        settle(x)
    with in_backward(mode, outputs):
        grads = func(*args, **kwargs)
    for x, grad in zip(inputs, grads, strict=True):
        if grad is not None:
            known = type_or_error(x, "autograd.grad").dual()
            tags.put(grad, hooked_type("autograd.grad", x, known, grad))
    return grads


def gradient_of(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.grad: the gradient has the dual of the type of x, until it is reduced."""
    grad = func(*args, **kwargs)
    known = tags.get(args[0])
    if isinstance(grad, Tensor) and known is not None and tags.get(grad) is None:
        try:
            tags.put(grad, reduced(known.dual(), note_of(grad)))
        except Refusal:
            tags.put(grad, known.dual())  # whoever uses it as a gradient says what is wrong
        tags.mark_gradient(grad)
    return grad


def set_gradient(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.grad = g: g is the gradient of x, whole or reduced, on any presentation."""
    x, grad = args
    known, found = tags.get(x), tags.get(grad) if isinstance(grad, Tensor) else None
    if known is None or known.fresh is not None or found is None or found.fresh is not None:
        result = func(*args, **kwargs)
        is_zero = (
            found is not None and found.fresh == ZERO and not tags.is_overwritten(grad)
        )
        if is_zero and known is not None and known.fresh is None:
            tags.put(grad, known.dual())  # zeros are the gradient before any backward
        return result
    wanted, name = known.dual(), name_of(x) or "x"
    where = located(f"{name}.grad")
    try:
        shown = presented(found, known.mesh)
    except Refusal as refusal:
        raise misfit(where, name, refusal) from None
    for axis, t in wanted.items():
        if shown[axis] != t and (t.letter != "P" or shown[axis].letter not in "RI"):
            raise mismatch(
                where, "the gradient", axis, repr(t), repr(shown[axis]),
                rule="the gradient of a value has the dual of its type, or is Replicate "
                "where it was Partial and is reduced",
                operands=[described(x, known), described(grad, found)],
            )  # fmt: skip
    if shown.types == wanted.types:
        return func(*args, **kwargs)
    check_noted(where, name, wanted, shown, note := note_of(grad))
    result = func(*args, **kwargs)
    if note is not None:
        put_note(grad, note)
        watch(x)
    return result


AUTOGRAD: dict[str, Callable[..., Any]] = {
    "backward": _backward,
    "grad": _grad,
}
