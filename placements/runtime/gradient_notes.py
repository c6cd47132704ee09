"""Notes on gradients: what typed collectives did to them, with checking on or off.

Types are not followed in hooks, nor with checking off. Yet a hook, or an assignment to
`.grad`, may reduce a gradient, and a second sum would count the gradient once for every
rank. So a typed collective notes what it did on the memory of its result, which all views
share. If it is a sum, it also notes on the memory of its input that the input was summed.
`gradient_watch.py` carries notes over to what backward makes of the result.
"""

import weakref
from collections import Counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from placements._torch import backward_node, base_of, leaf_of, memory_of, version_of
from placements.inference.presentations import matching_axes
from placements.inference.terms import Refusal
from placements.runtime import tags
from placements.runtime.callsite import caller
from placements.types.axis import WORDS, AxisType
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType


class Step(NamedTuple):
    """What typed collectives and casts did on one axis, from which type to which."""

    call: str
    mesh: Mesh | None  # None: `axis` is the name of a process group
    axis: str
    src: AxisType
    dst: AxisType
    site: str  # where it was called, if it was in a hook

    def __str__(self) -> str:
        return f"{self.call} over {self.axis!r}" + (f" at {self.site}" if self.site else "")

    @property
    def place(self) -> tuple[Mesh | None, str]:
        return self.mesh, self.axis

    @property
    def is_sum(self) -> bool:
        return self.src.letter == "P" and self.dst.letter in "RI"


def followed_by(steps: tuple[Step, ...], step: Step) -> tuple[Step, ...]:
    """Return the steps with one more, merged into one step for each axis.

    A step that expects another type than the value has is kept apart, since no later step
    makes it right. At most two steps are kept for an axis, so the list stays short.
    """
    same = [old for old in steps if old.place == step.place]
    if not same:
        return (*steps, step)
    if len(same) > 1:
        return steps
    if not _fits(same[0].dst, step.src):
        return (*steps, step)
    others = tuple(old for old in steps if old is not same[0])
    return (*others, step._replace(src=same[0].src))


def _fits(found: AxisType, wanted: AxisType) -> bool:
    return found == wanted or found.letter + wanted.letter in ("RI", "IR")


class Note(NamedTuple):
    """What happened to a gradient since backward made it."""

    steps: tuple[Step, ...] = ()
    version: int = 0  # the count of writes to the tensor when it was noted
    watched: bool = False  # what backward adds is seen; other writes only scale it
    by_us: bool = False  # reduce_gradients did it
    trouble: str = ""  # a key of TROUBLES: why nobody knows what the gradient holds
    of: TensorType | None = None  # what it was before the steps, where a hook is checked

    def in_trouble(self, trouble: str) -> "Note":
        return self._replace(trouble=self.trouble or trouble)

    def effect(self) -> frozenset[Any]:
        """Return a value that is equal for two notes whose gradients can be added."""
        ends = ((s.place, "RI" if s.dst.letter in "RI" else s.dst) for s in self.steps)
        return frozenset(Counter(ends).items())


class Read(NamedTuple):
    """A note on memory that was handed to a sum: by which step and which tensor."""

    step: Step
    owner: Any  # a weak reference to the tensor, or to the tensor that it is a view of
    version: int  # the count of writes to the memory at that time

    def is_untouched(self, tensor: Tensor) -> bool:
        """Return whether the memory is certainly as it was.

        torch counts no writes through `.data`, which is another owner of the memory.
        """
        return self.owner() is _owner(tensor) and self.version == version_of(tensor)


def _owner(tensor: Tensor) -> Tensor:
    return tensor if (base := base_of(tensor)) is None else base


class Trouble(NamedTuple):
    """Why nobody knows what a gradient holds, and what to do about it."""

    headline: str
    actual: str
    rule: str
    advice: str


_START_ANEW = (
    "zero_grad() before the next step's first backward, which drops gradients "
    "(set_to_none=True)"
)

TROUBLES: dict[str, Trouble] = {
    "added to": Trouble(
        "backward added to {gradient} after it was reduced",
        "Replicate plus Partial",
        "a sum over ranks that is done and one that is due are no longer told apart",
        "reduce once, after the last backward, or in a hook of every backward; "
        + _START_ANEW,
    ),
    "mixed": Trouble(
        "{gradient} is the sum of backward passes that were reduced in different ways",
        "Partial plus Replicate",
        "a sum over ranks that is done and one that is due are no longer told apart",
        "reduce in a hook of every backward or of none; " + _START_ANEW,
    ),
    "not followed": Trouble(
        "a hook called {step} and returned another tensor than the result, or assigned "
        "one, as {gradient}",
        "not known",
        "ops in a hook are not followed, so whether it was reduced is not known",
        "let the hook return, or assign to p.grad, the result of the collective as it is: "
        "all_reduce(g / n, axis, src=P, dst=R), not all_reduce(g, ...) / n",
    ),
    "written": Trouble(
        "{gradient} was reduced ({step}) and written in place since",
        "not known",
        "another backward may have added to it, so whether it is complete is not known",
        "scale it before it is reduced; reduce after the last backward",
    ),
    "copied": Trouble(
        "{gradient} was handed to a sum ({step}) and written in place since, or may have "
        "been under another name for its memory (detach(), .data)",
        "not known",
        "if the sum was copied into it a second one would count it once for every rank",
        "assign the sum (p.grad = all_reduce(p.grad, axis, src=P, dst=R)), or leave it to "
        "reduce_gradients(module); to look at a sum only, pass p.grad.clone()",
    ),
}  # fmt: skip


def note_of(tensor: Tensor) -> Note | None:
    """Return the note of a gradient; the note says if the gradient was written since."""
    return _note_on(tensor, memory_of(tensor))


def _kept_note(tensor: Tensor, memory: Any) -> Note | None:
    return getattr(tensor, tags.NOTE, None) or getattr(memory, tags.NOTE, None)


def _note_on(tensor: Tensor, memory: Any) -> Note | None:
    note = _kept_note(tensor, memory)
    if note is None:
        read = cast(Read | None, getattr(memory, tags.READ, None))
        if read is None or read.is_untouched(tensor):
            return None
        return Note((read.step,), trouble="copied")
    if note.watched or note.version == version_of(tensor):
        return note
    return note.in_trouble("written")


def put_note(tensor: Tensor, note: Note) -> None:
    """Put a note on a gradient whose additions are watched from now on."""
    setattr(tensor, tags.NOTE, note._replace(version=version_of(tensor), watched=True))


def forget(tensor: Tensor) -> None:
    """Drop the type and the notes of a gradient that starts anew in the same memory."""
    tags.clear(tensor)
    for place in (tensor, memory_of(tensor)):
        for name in (tags.NOTE, tags.READ):
            if getattr(place, name, None) is not None:
                delattr(place, name)


def was_written(tensor: Tensor) -> bool:
    """Return whether a gradient that is noted was written in place since."""
    note = _kept_note(tensor, memory_of(tensor))
    return note is not None and note.version != version_of(tensor)


def was_read(tensor: Tensor) -> bool:
    """Return whether a sum has read the memory and nobody has written to it since."""
    read = cast(Read | None, getattr(memory_of(tensor), tags.READ, None))
    return read is not None and read.is_untouched(tensor)


def read_again(tensor: Tensor) -> None:
    """Update the note on memory that a sum has read: backward has added to the memory."""
    memory = memory_of(tensor)
    read = cast(Read, getattr(memory, tags.READ))
    setattr(memory, tags.READ, read._replace(version=version_of(tensor)))


def note_move(x: Tensor, result: Tensor, step: Step) -> Step | None:
    """Note on a result that may be a gradient what a collective made of it.

    With nothing known of `x`, outside of backward, only a sum makes a gradient something
    else. Returns the step if it was noted in backward.
    """
    if torch.compiler.is_compiling():
        return None
    is_sum = step.is_sum
    memory, source, node = memory_of(result), memory_of(x), backward_node()
    if memory is None:
        return None
    version, before = version_of(result), _note_on(x, source)
    if node is None and before is None and not is_sum:
        return None
    if node is not None:
        step = step._replace(site=caller())
    leaf = None if node is None else leaf_of(node)
    if before is None:
        note = Note((step,), version, of=tags.get(x))
    else:
        steps = followed_by(before.steps, step)
        note = Note(steps, version, trouble=before.trouble, of=before.of)
    # A cast has the memory of its input. What the backward of a Function gives is not the
    # gradient of a leaf, though a leaf may take over its memory.
    on_memory = memory is not source and (node is None or leaf is not None)
    setattr(memory if on_memory else result, tags.NOTE, note)
    if before is None and is_sum and (tags.get(x) is None or node is not None):
        _note_read(x, source, step, node is not None, leaf)
    return None if node is None else step


def _note_read(
    x: Tensor, memory: Any, step: Step, hooked: bool, leaf: Tensor | None
) -> None:
    """Note that the memory of `x`, which may be that of a gradient, was summed."""
    if hooked and (leaf is None or leaf.grad is None or memory_of(leaf.grad) is not memory):
        return  # a gradient on its way, which is followed
    is_new = getattr(memory, tags.READ, None) is None
    if is_new and not (x.requires_grad and not hooked):
        setattr(memory, tags.READ, Read(step, weakref.ref(_owner(x)), version_of(x)))


def reduced(wanted: TensorType, note: Note | None) -> TensorType:
    """Return the type of a gradient that was `wanted` before the noted steps.

    Raises Refusal if a collective took the gradient for another type than it had, or
    reduced it over ranks that the axes of its mesh cannot name.
    """
    if note is None or not note.steps:
        return wanted
    types = dict(zip(wanted.mesh.axes, wanted.types, strict=True))
    others: dict[Mesh, dict[str, Step]] = {}
    for step in note.steps:
        axis = _axis_in(wanted.mesh, step)
        if axis is not None:
            _take(types, axis, step)
        elif step.mesh is None:
            raise Refusal(f"{step}: no axis of {wanted.mesh!r} has the ranks of this group")
        else:
            on_mesh = others.setdefault(step.mesh, {})
            if step.axis in on_mesh:
                _take({step.axis: on_mesh[step.axis].dst}, step.axis, step)
            on_mesh[step.axis] = step
    for mesh, steps in others.items():
        _take_presented(types, wanted.mesh, mesh, steps)
    return TensorType(wanted.mesh, tuple(types[a] for a in wanted.mesh.axes), wanted.orders)


def _axis_in(mesh: Mesh, step: Step) -> str | None:
    if step.mesh is not None:
        return step.axis if step.mesh == mesh else None
    if mesh.device_mesh is None:
        return None
    groups = {axis: cast(Any, mesh.group(axis)).group_name for axis in mesh.axes}
    return next((axis for axis, name in groups.items() if name == step.axis), None)


def _take(types: dict[str, AxisType], axis: str, step: Step) -> None:
    found = types[axis]
    if not _fits(found, step.src):
        why = "every rank's whole gradient was added: once for every rank too much"
        if found.letter not in "RI" or step.src.letter != "P":
            why = "the collective took its values for something that they are not"
        raise Refusal(
            f"{step} took it for {WORDS[step.src.letter]}, but it was "
            f"{WORDS[found.letter]}: {why}",
            axis,
        )
    types[axis] = step.dst


def _take_presented(
    types: dict[str, AxisType], target: Mesh, mesh: Mesh, steps: dict[str, Step]
) -> None:
    """Apply steps on `mesh` to the types on `target`, a mesh over the same ranks."""
    if mesh.rank_order() != target.rank_order():
        raise Refusal(f"it was reduced on {mesh!r}, which is not over the same ranks")
    for old, new in matching_axes(mesh, target):
        done = [steps[axis] for axis in old if axis in steps]
        if not done:
            continue
        step = done[0]
        left = [axis for axis in old if axis not in steps]
        if left:
            raise Refusal(
                f"{step} of {mesh!r} covers only a part of the ranks of "
                f"{' and '.join(map(repr, new))}; {left[0]!r} is left out",
                new[0],
            )
        for one in done[1:]:
            if not (_fits(one.src, step.src) and _fits(one.dst, step.dst)):
                raise Refusal(
                    f"{step} and {one} of {mesh!r} do different things, but their ranks "
                    f"are those of {' and '.join(map(repr, new))} together",
                    new[0],
                )
        for axis in new:
            _take(types, axis, step)
