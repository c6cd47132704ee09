"""What backward adds to the gradient of a leaf, followed where hooks reduce it.

A typed collective that is called in a hook knows from the node of the graph which leaf the
hook belongs to. From then on the leaf is watched: what its hooks returned at last, and
what was there before. Backward passes that were all reduced alike add up; others do not.
"""

import weakref
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from placements import tags
from placements.callsite import name_of
from placements.describe import dtype_name, printed
from placements.errors import PlacementError
from placements.infer import Refusal
from placements.reductions import TROUBLES, Note, note_of, put_note, reduced
from placements.state import current
from placements.tensor_type import TensorType
from placements.torch_private import (
    backward_node,
    backward_pass,
    before_node,
    leaf_of,
    on_accumulation,
    on_gradient,
    version_of,
)

_watches: Any = WeakIdKeyDictionary()


class Watch:
    """Follows the gradient of one leaf, until a backward starts anew without a note."""

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = weakref.ref(leaf)
        self._before: tuple[bool, Note | None] | None = None  # is there one; its note
        self._coming: Note | None = None
        self._inputs: list[tuple[Tensor, int]] = []
        self._pass = backward_pass()
        self._following: RemovableHandle | None = None
        self._begun: RemovableHandle | None = None
        self._done = on_accumulation(leaf, self._added)

    def follow(self, leaf: Tensor, node: Any, x: Tensor) -> None:
        """A collective read `x` in a hook of the leaf: see what its hooks return at last.

        A hook of the node runs after all hooks of the tensor, and in this pass already.
        """
        if self._pass != backward_pass() or self._following is None:
            self._forget()
            self._pass = backward_pass()
            self._following = before_node(node, self._arrives)
        if self._begun is None:
            self._begun = on_gradient(leaf, self._begins)
        self._inputs.append((x, version_of(x)))

    def _forget(self) -> None:
        self._inputs = []
        if self._following is not None:
            self._following.remove()
            self._following = None

    def _begins(self, _: Tensor | None = None) -> None:
        leaf = self._leaf()
        grad = None if leaf is None else leaf.grad
        self._before = grad is not None, None if grad is None else note_of(grad)

    def _arrives(self, grad: Tensor | None) -> None:
        inputs, here = self._inputs, self._pass == backward_pass()
        self._forget()
        leaf = self._leaf()
        if leaf is None or grad is None or not here:
            return
        self._begins()
        note = note_of(grad)
        if note is not None and not note.is_input:
            self._coming = note.watched()
            _check_now(leaf, note)
        elif not any(x is grad and version_of(x) == version for x, version in inputs):
            step = next((n for x, _ in inputs if (n := note_of(x)) is not None), Note())
            self._coming = Note(step.steps, trouble="not followed")

    def _added(self, leaf: Tensor) -> None:
        before, self._before = self._before, None
        coming, self._coming = self._coming, None
        if leaf.grad is None:
            return
        if before is None:
            if self._pass == backward_pass():
                return  # watched only since the hooks that run now
            note = note_of(leaf.grad)  # what was written in place keeps its note
            before = note is not None, note
        was_there, prior = before
        if not was_there:
            if coming is not None:
                put_note(leaf.grad, coming)
            else:
                self.stop(leaf)
            return
        if prior is not None or coming is not None:
            put_note(leaf.grad, _together(prior, coming))

    def stop(self, leaf: Tensor) -> None:
        self._forget()
        for handle in (self._begun, self._done):
            if handle is not None:
                handle.remove()
        _watches.pop(leaf, None)


def _together(prior: Note | None, coming: Note | None) -> Note:
    """The note of a sum of gradients with these notes."""
    first, second = prior or Note(), coming or Note()
    if first.trouble or second.trouble:
        return first.in_trouble(second.trouble)
    if first.is_input and not second.steps:
        return first
    if not first.is_input and first.effect() == second.effect():
        return first
    note = first if first.steps else second
    return note.in_trouble("mixed" if second.steps else "added to")


def watch(leaf: Tensor) -> Watch:
    """Follow what backward adds to the gradient of a leaf from now on."""
    found: Watch | None = _watches.get(leaf)
    if found is None:
        found = _watches[leaf] = Watch(leaf)
    return found


def watch_noted(leaf: Tensor) -> None:
    """Follow a gradient that is known to be reduced, before it is written in place."""
    note = None if leaf.grad is None else note_of(leaf.grad)
    if leaf.grad is None or note is None or note.is_input or note.version is None:
        return
    put_note(leaf.grad, note.watched())
    watch(leaf)


def follow_hook(x: Tensor) -> None:
    """A typed collective read `x` while backward runs: watch whose gradient it is."""
    node = backward_node()
    if node is None:
        return
    leaf = leaf_of(node)
    if leaf is None:
        if current.in_backward:
            before_node(node, _refuse_change)
    elif x.shape == leaf.shape and x is not leaf.grad:
        watch(leaf).follow(leaf, node, x)


def _refuse_change(grad: Tensor | None) -> None:
    """The gradient that flows on keeps its type: what is before was checked with it."""
    note = None if grad is None else note_of(grad)
    if note is None or note.is_input:
        return
    first = {(step.mesh, step.axis): step for step in reversed(note.steps)}
    last = {(step.mesh, step.axis): step for step in note.steps}
    for place, step in last.items():
        src, dst = first[place].src, step.dst
        if src != dst and src.letter + dst.letter not in ("RI", "IR"):
            raise PlacementError(
                f"a hook changes the gradient that flows on: {step} makes it {dst!r} on "
                f"axis {step.axis!r}, expected {src!r} as before",
                where="backward",
                axis=step.axis,
                expected=repr(src),
                actual=repr(dst),
                rule="the gradient of a value has the dual of its type, and what is before "
                "the value was checked with it",
                advice="sum in forward, where the types see it: convert(x, axis, src=I, "
                "dst=R) has the all-reduce as its backward; or in a hook of a parameter",
            )


def _check_now(leaf: Tensor, note: Note) -> None:
    """In a checked block the type of the leaf is known: say at once what does not fit."""
    known = tags.get(leaf)
    if not current.in_backward or known is None or known.fresh is not None:
        return
    try:
        reduced(known.dual(), note)
    except Refusal as refusal:
        name = name_of(leaf) or printed(tuple(leaf.shape), dtype_name(leaf), known)
        raise misfit("backward", name, refusal) from None


def check_noted(
    call: str, name: str, wanted: TensorType, found: TensorType, note: Note | None
) -> None:
    """Refuse a gradient whose type says that it is reduced, if nothing else does.

    With checking off the note is all there is, and a program that was checked must do
    the same then.
    """
    if note is not None and note.trouble:
        raise in_trouble(call, name, note)
    try:
        noted = reduced(wanted, note)
    except Refusal as refusal:
        raise misfit(call, name, refusal) from None
    for axis in wanted:
        if wanted[axis] != found[axis] and noted[axis].letter not in "RI":
            raise PlacementError(
                f"{call}: the gradient of {name!r} is reduced on axis {axis!r}, but is not "
                "the result of a typed collective",
                where=call,
                name=name,
                axis=axis,
                expected="Partial, or the result of a typed collective",
                actual=repr(found[axis]),
                rule="with checking off nothing would show that it is reduced, and "
                "reduce_gradients would sum it again",
                advice="assign the result as it is: p.grad = all_reduce(p.grad / n, "
                f"{axis!r}, src=P, dst=R), not all_reduce(...) / n",
            )


def misfit(call: str, name: str, refusal: Refusal) -> PlacementError:
    """The error for a gradient that was reduced as if it were another type."""
    return PlacementError(
        f"{call}: the gradient of {name!r} was reduced by other means: {refusal.reason}",
        where=call,
        name=name,
        axis=refusal.axis,
        rule="the gradient of a parameter has the dual of its type: it is summed where "
        "the parameter is Replicate, and only there",
        advice="gradient_axes(module) says over which axes; or leave it to "
        "reduce_gradients(module)",
    )


def in_trouble(call: str, name: str, note: Note) -> PlacementError:
    """The error for a gradient of which it is not known what it is."""
    trouble, gradient = TROUBLES[note.trouble], f"the gradient of {name!r}"
    step = next(map(str, reversed(note.steps)), "a collective")
    return PlacementError(
        f"{call}: {trouble.headline.format(gradient=gradient, step=step)}",
        where=call,
        name=name,
        axis=note.steps[-1].axis if note.steps else None,
        expected="Partial",
        actual=trouble.actual,
        rule=trouble.rule,
        advice=trouble.advice,
    )
