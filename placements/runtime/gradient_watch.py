"""Watch what backward adds to the gradient of a leaf whose hooks reduce gradients.

A typed collective that is called in a hook knows from the node of the graph which leaf the
hook belongs to. From then on the leaf is watched: what its hooks returned in the end, and
what the gradient was before. Gradients of several backward passes may be added only if all
of them were reduced alike.
"""

import weakref
from collections.abc import Iterator
from typing import Any, cast

from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from placements._torch import (
    backward_node,
    backward_pass,
    before_node,
    leaf_of,
    memory_of,
    on_accumulation,
    on_gradient,
    version_of,
)
from placements.inference.fixes import call_text
from placements.inference.terms import Refusal
from placements.runtime import tags
from placements.runtime.callsite import locals_in_hook, name_of
from placements.runtime.describe import dtype_name, printed
from placements.runtime.dtensors import local_part
from placements.runtime.errors import PlacementError, refused
from placements.runtime.gradient_notes import (
    TROUBLES,
    Note,
    Step,
    forget,
    note_of,
    put_note,
    read_again,
    reduced,
    was_read,
    was_written,
)
from placements.runtime.state import current
from placements.types.axis import P, R
from placements.types.tensor import TensorType

_watches: Any = WeakIdKeyDictionary()


class Hooked:
    """The first collective that the hooks of a leaf called in one backward pass.

    A tensor that existed before the call is not made from its result. So this keeps
    copies of the input and of the tensors in the calling frames: one of those tensors is
    the gradient, unless a hook made a new one earlier.
    """

    def __init__(self, leaf: Tensor, x: Tensor, step: Step) -> None:
        self.step = step
        self.run = backward_pass()
        self.memory = None if leaf.grad is None else memory_of(leaf.grad)
        self.version = None if leaf.grad is None else version_of(leaf.grad)
        self.prior = None if leaf.grad is None else note_of(leaf.grad)
        alike = {id(t): t for t in _tensors([x, *locals_in_hook()])}.values()
        self._there = [
            (t, version_of(t), t.detach().clone())
            for t in alike
            if t.numel() == leaf.numel() and t is not leaf and t is not leaf.grad
        ]

    def outcome(self, grad: Tensor) -> Note | None:
        """Return the note of what the hooks returned; None if they changed nothing."""
        note = note_of(grad)
        if note is not None:
            return note
        for tensor, version, values in self._there:
            if memory_of(tensor) is memory_of(grad):
                same = version == version_of(tensor) and _equal(tensor, values)
                return None if same else Note((self.step,), trouble="copied")
        return Note((self.step,), trouble="not followed")


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (v for v in cast(list[Any], value) if isinstance(v, Tensor))


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether the values are the same; NaN equals NaN here."""
    return a.is_meta or bool(((a == b) | ((a != a) & (b != b))).all())


def was_zeroed(grad: Tensor) -> bool:
    """Return whether a gradient that was reduced now holds zeros, which fit any type."""
    if not was_written(grad) or grad.is_meta:
        return False
    return not bool(local_part(grad)[0].any())


class Watch:
    """Follows the gradient of one leaf, until a backward starts anew without a note."""

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = weakref.ref(leaf)
        # Whether there was a gradient before this pass, and its note.
        self._before: tuple[bool, Note | None] | None = None
        self._coming: Note | None = None
        self._was_read = False
        self.hooked: Hooked | None = None
        self._arriving: RemovableHandle | None = None
        self._marked: Any = None  # a weak reference to what was reduced last
        self._handles = (
            on_gradient(leaf, self._begins),
            on_accumulation(leaf, self._added),
        )

    def follow(self, leaf: Tensor, node: Any, x: Tensor, step: Step) -> None:
        """Note what the hooks of the leaf return, after one of them called a collective.

        A hook of the node runs after all hooks of the tensor, even in this pass.
        """
        if self.hooked is not None and self.hooked.run == backward_pass():
            return
        self.settle(leaf)
        self.hooked = Hooked(leaf, x, step)
        self._arriving = before_node(node, self._arrives)

    def _take_hooked(self) -> Hooked | None:
        hooked, self.hooked = self.hooked, None
        if self._arriving is not None:
            self._arriving.remove()
            self._arriving = None
        return hooked

    def settle(self, leaf: Tensor) -> None:
        """Note what a hook that ran after the addition has left in `.grad`.

        Either it assigned the result of its collective, which has a note, or nobody knows
        what it assigned.
        """
        hooked, grad = self._take_hooked(), leaf.grad
        if hooked is None or grad is None or note_of(grad) is not None:
            return
        if memory_of(grad) is not hooked.memory:
            put_note(grad, Note((hooked.step,), trouble="not followed"))

    def captured(self, grad: Tensor) -> Note | None:
        """Return the note of a gradient that autograd returned, not added to `.grad`."""
        hooked = self._take_hooked()
        return note_of(grad) if hooked is None else hooked.outcome(grad)

    def _begins(self, _: Tensor | None = None) -> None:
        leaf = self._leaf()
        if leaf is None:
            return
        if self.hooked is not None and self.hooked.run != backward_pass():
            self.settle(leaf)
        grad = leaf.grad
        note = None if grad is None else note_of(grad)
        self._was_read = grad is not None and was_read(grad)
        if grad is None or was_zeroed(grad):
            self._before = False, None
            old = None if self._marked is None else self._marked()
            if old is not None and was_written(old):
                forget(old)  # a buffer of the user's, zeroed for this step
        else:
            self._before = True, note

    def _arrives(self, grad: Tensor | None) -> None:
        hooked, leaf = self._take_hooked(), self._leaf()
        if hooked is None or leaf is None or grad is None or hooked.run != backward_pass():
            return
        self._begins()
        self._coming = hooked.outcome(grad)
        if self._coming is not None and not self._coming.trouble:
            _check_now(leaf, self._coming)

    def _added(self, leaf: Tensor) -> None:
        before, self._before = self._before, None
        coming, self._coming = self._coming, None
        hooked, grad = self._take_hooked(), leaf.grad
        if grad is None:
            return
        if hooked is not None and memory_of(grad) is hooked.memory:
            if version_of(grad) == hooked.version:  # it only looked, after the addition
                hooked = None
        if hooked is not None:  # in a hook of the node, or one that ran after the addition
            note = note_of(grad)
            if note is None and hooked.memory is None:
                note = hooked.outcome(grad)
            elif note is None:
                note = Note((hooked.step,), trouble="not followed")
            if note is not None:
                put_note(grad, note)
            return
        if before is None:
            return  # watched only since the hooks that run now
        was_there, prior = before
        if was_there and (prior is not None or coming is not None):
            put_note(grad, _together(prior, coming))
        elif was_there and self._was_read:
            read_again(grad)
        elif not was_there:
            self._starts_anew(leaf, grad, coming)

    def _starts_anew(self, leaf: Tensor, grad: Tensor, coming: Note | None) -> None:
        forget(grad)
        if coming is not None:
            put_note(grad, coming)
        else:
            self.stop(leaf)

    def mark(self, grad: Tensor) -> None:
        """Remember the gradient that was reduced, until backward starts anew."""
        self._marked = weakref.ref(grad)

    def stop(self, leaf: Tensor) -> None:
        self._take_hooked()
        for handle in self._handles:
            handle.remove()
        _watches.pop(leaf, None)


def _together(prior: Note | None, coming: Note | None) -> Note:
    """Return the note of the sum of two gradients that have these notes."""
    first, second = prior or Note(), coming or Note()
    if first.trouble or second.trouble:
        return (first if first.trouble else second).in_trouble(second.trouble)
    if first.effect() == second.effect():
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
    if leaf.grad is not None and note is not None and not note.watched:
        put_note(leaf.grad, note)
        watch(leaf)


def after_a_sum() -> PlacementError | None:
    """Return the error for what a hook makes of the result of a collective, if it is one.

    The hook is the one that runs, and has called a collective.
    """
    node = backward_node()
    leaf = None if node is None else leaf_of(node)
    found: Watch | None = None if leaf is None else _watches.get(leaf)
    hooked = None if found is None else found.hooked
    if leaf is None or hooked is None or hooked.run != backward_pass():
        return None
    note = Note((hooked.step,), trouble="not followed")
    return in_trouble("backward", _printed(leaf), note)


def _printed(leaf: Tensor) -> str:
    return name_of(leaf) or printed(tuple(leaf.shape), dtype_name(leaf), tags.get(leaf))


def settle(leaf: Tensor) -> None:
    """Note what hooks that called collectives have left as the gradient of a leaf."""
    found: Watch | None = _watches.get(leaf)
    if found is not None:
        found.settle(leaf)


def hooked_type(call: str, leaf: Tensor, wanted: TensorType, grad: Tensor) -> TensorType:
    """Return the type of a gradient that autograd handed out, after its leaf's hooks."""
    found: Watch | None = _watches.get(leaf)
    note = note_of(grad) if found is None else found.captured(grad)
    if note is None:
        return wanted
    name = _printed(leaf)
    if note.trouble:
        raise in_trouble(call, name, note)
    try:
        return reduced(wanted, note)
    except Refusal as refusal:
        raise misfit(call, name, refusal) from None


def follow_hook(x: Tensor, step: Step) -> None:
    """Watch the leaf whose hook calls a typed collective on `x` while backward runs."""
    node = backward_node()
    if node is None:
        return
    leaf = leaf_of(node)
    if leaf is not None:
        watch(leaf).follow(leaf, node, x, step)
    elif current.in_backward:
        handle: RemovableHandle | None = None

        def refuse(grad: Tensor | None) -> None:
            if handle is not None:
                handle.remove()  # for this pass only
            _refuse_change(grad)

        handle = before_node(node, refuse)


def _refuse_change(grad: Tensor | None) -> None:
    """Raise PlacementError if a hook changed the type of a gradient that flows on."""
    note = None if grad is None else note_of(grad)
    for step in () if note is None else note.steps:
        src, dst = step.src, step.dst
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
    """Raise PlacementError at once, if the type of the leaf is known, for a wrong sum."""
    known = tags.get(leaf)
    if not current.in_backward or known is None or known.fresh is not None:
        return
    try:
        reduced(known.dual(), note)
    except Refusal as refusal:
        raise misfit("backward", _printed(leaf), refusal) from None


def check_noted(
    where: str, name: str, wanted: TensorType, found: TensorType, note: Note | None
) -> None:
    """Raise PlacementError for a gradient that its type calls reduced and no note does.

    With checking off there are only notes, and a program that was checked must do the
    same then.
    """
    if note is not None and note.trouble:
        raise in_trouble(where, name, note)
    try:
        noted = reduced(wanted, note)
    except Refusal as refusal:
        raise misfit(where, name, refusal) from None
    for axis in wanted:
        if wanted[axis] != found[axis] and noted[axis].letter not in "RI":
            raise refused(
                where,
                f"the gradient of {name!r} is reduced on axis {axis!r}, but is not the "
                "result of a typed collective",
                name=name,
                axis=axis,
                expected="Partial, or the result of a typed collective",
                actual=repr(found[axis]),
                rule="with checking off nothing would show that it is reduced, and "
                "reduce_gradients would sum it again",
                advice="assign the result as it is: p.grad = "
                f"{call_text('all_reduce', 'p.grad / n', axis, P, R)}, not "
                "all_reduce(...) / n",
            )


def misfit(where: str, name: str, refusal: Refusal) -> PlacementError:
    """Return the error for a gradient that was reduced as if it were another type."""
    return refused(
        where,
        f"the gradient of {name!r} was reduced by other means: {refusal.reason}",
        name=name,
        axis=refusal.axis,
        rule="the gradient of a parameter has the dual of its type: it is summed where "
        "the parameter is Replicate, and only there",
        advice="gradient_axes(module) says over which axes; or leave it to "
        "reduce_gradients(module)",
    )


def in_trouble(where: str, name: str, note: Note) -> PlacementError:
    """Return the error for a gradient of which nobody knows what it holds."""
    trouble, gradient = TROUBLES[note.trouble], f"the gradient of {name!r}"
    step = next(map(str, reversed(note.steps)), "a collective")
    return refused(
        where,
        trouble.headline.format(gradient=gradient, step=step),
        name=name,
        axis=note.steps[-1].axis if note.steps else None,
        expected="Partial",
        actual=trouble.actual,
        rule=trouble.rule,
        advice=trouble.advice,
    )
