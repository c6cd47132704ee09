"""What typed collectives did to a gradient, noted on it, with checking on or off.

Types are not followed in hooks, nor with checking off. Yet a hook, or an assignment to
`.grad`, may reduce a gradient, and a second sum would count it once for every rank. So a
typed collective notes on the memory of its result what it did, which every view of it
shares, and on that of its input that it was summed. `leaf_gradients.py` carries notes over
to what backward makes of the result.
"""

import weakref
from collections import Counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from placements._torch import backward_node, base_of, leaf_of, memory_of, version_of
from placements.inference.presentations import blocks
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


Steps = tuple[Step, ...]


def followed_by(steps: Steps, step: Step) -> Steps:
    """One step for each axis, from the first type to the last.

    A step that takes the value for what it is not stays apart: it is one sum too many,
    or none of a gradient, and no later step mends it. So there are never many.
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

    steps: Steps = ()
    version: int = 0  # the count of writes to the tensor when it was noted
    watched: bool = False  # what backward adds is seen; other writes only scale it
    by_us: bool = False  # reduce_gradients did it
    trouble: str = ""  # a key of TROUBLES: what is in it is not known

    def in_trouble(self, trouble: str) -> "Note":
        return self._replace(trouble=self.trouble or trouble)

    def effect(self) -> frozenset[Any]:
        """What two notes have in common if gradients that have them can be added."""
        ends = ((s.place, "RI" if s.dst.letter in "RI" else s.dst) for s in self.steps)
        return frozenset(Counter(ends).items())


class Read(NamedTuple):
    """Memory that was handed to a sum: the step, by which name, and its writes then."""

    step: Step
    owner: Any  # a weak reference to the tensor, or to what it is a view of
    version: int

    def is_untouched(self, tensor: Tensor) -> bool:
        """Whether the memory is known to be as it was; `.data` hides writes to it."""
        return self.owner() is _owner(tensor) and self.version == version_of(tensor)


def _owner(tensor: Tensor) -> Tensor:
    return tensor if (base := base_of(tensor)) is None else base


class Trouble(NamedTuple):
    """Why it is not known what a gradient is, and what to do."""

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
    """What is known to have happened to a gradient; a write that is not watched shows."""
    memory = memory_of(tensor)
    note = cast(
        Note | None, getattr(tensor, tags.NOTE, None) or getattr(memory, tags.NOTE, None)
    )
    if note is None:
        read = cast(Read | None, getattr(memory, tags.READ, None))
        if read is None or read.is_untouched(tensor):
            return None
        return Note((read.step,), trouble="copied")
    if note.watched or note.version == version_of(tensor):
        return note
    return note.in_trouble("written")


def put_note(tensor: Tensor, note: Note) -> None:
    """Note of a gradient whose additions are watched from now on."""
    setattr(tensor, tags.NOTE, note._replace(version=version_of(tensor), watched=True))


def forget(tensor: Tensor) -> None:
    """The gradient starts anew in the same memory."""
    tags.clear(tensor)
    for place in (tensor, memory_of(tensor)):
        for name in (tags.NOTE, tags.READ):
            if getattr(place, name, None) is not None:
                delattr(place, name)


def was_written(tensor: Tensor) -> bool:
    """Whether a gradient that is noted was written in place since."""
    memory = memory_of(tensor)
    note = cast(
        Note | None, getattr(tensor, tags.NOTE, None) or getattr(memory, tags.NOTE, None)
    )
    return note is not None and note.version != version_of(tensor)


def was_read(tensor: Tensor) -> bool:
    """Whether a sum has read the memory and it is as it was."""
    read = cast(Read | None, getattr(memory_of(tensor), tags.READ, None))
    return read is not None and read.is_untouched(tensor)


def read_again(tensor: Tensor) -> None:
    """Backward has added to memory that a sum has read."""
    memory = memory_of(tensor)
    read = cast(Read, getattr(memory, tags.READ))
    setattr(memory, tags.READ, read._replace(version=version_of(tensor)))


def note_move(x: Tensor, result: Tensor, step: Step) -> Step | None:
    """Note on a result that may be a gradient what a collective made of it.

    With nothing known of `x`, outside of backward, only a sum makes a gradient something
    else. Returns the step if it was noted in backward.
    """
    memory = None if torch.compiler.is_compiling() else memory_of(result)
    if memory is None:
        return None
    before, node = note_of(x), backward_node()
    if node is None and before is None and not step.is_sum:
        return None
    if node is not None:
        step = step._replace(site=caller())
    leaf = None if node is None else leaf_of(node)
    if before is None:
        note = Note((step,), version_of(result))
    else:
        steps = followed_by(before.steps, step)
        note = Note(steps, version_of(result), trouble=before.trouble)
    # A cast has the memory of its input. What the backward of a Function gives is not the
    # gradient of a leaf, though a leaf may take over its memory.
    on_memory = memory is not memory_of(x) and (node is None or leaf is not None)
    setattr(memory if on_memory else result, tags.NOTE, note)
    if before is None and step.is_sum:
        _note_read(x, step, node is not None, leaf)
    return None if node is None else step


def _note_read(x: Tensor, step: Step, hooked: bool, leaf: Tensor | None) -> None:
    """Note that the memory of `x`, which may be that of a gradient, was summed."""
    memory = memory_of(x)
    if hooked and (leaf is None or leaf.grad is None or memory_of(leaf.grad) is not memory):
        return  # a gradient on its way, which is followed
    is_new = getattr(memory, tags.READ, None) is None
    if is_new and not (x.requires_grad and not hooked) and tags.get(x) is None:
        setattr(memory, tags.READ, Read(step, weakref.ref(_owner(x)), version_of(x)))


def reduced(wanted: TensorType, note: Note | None) -> TensorType:
    """What a gradient of type `wanted` is after what is noted.

    Raises Refusal if it is not what a collective took it for, or was reduced over ranks
    that the axes of its mesh cannot name.
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
            why = "it is of other values than those that were meant"
        raise Refusal(
            f"{step} took it for {WORDS[step.src.letter]}, but it was "
            f"{WORDS[found.letter]}: {why}",
            axis,
        )
    types[axis] = step.dst


def _take_presented(
    types: dict[str, AxisType], target: Mesh, mesh: Mesh, steps: dict[str, Step]
) -> None:
    """Steps on another presentation of the ranks, said on the axes of `target`."""
    if mesh.rank_order() != target.rank_order():
        raise Refusal(f"it was reduced on {mesh!r}, which is not over the same ranks")
    for old, new in blocks(mesh, target):
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
