"""What typed collectives did to a gradient, noted on it, with checking on or off.

Types are not followed in hooks, nor with checking off. Yet a hook, or an assignment to
`.grad`, may reduce a gradient, and a second sum would count it once for every rank. So a
typed collective notes on its result what it did, if the result takes no gradient of its
own. `leaf_gradients.py` carries the note over to what backward makes of the result.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from placements import tags
from placements.callsite import caller
from placements.infer import Refusal
from placements.mesh import Mesh
from placements.presentations import blocks
from placements.tensor_type import TensorType
from placements.torch_private import in_backward, version_of
from placements.types import WORDS, AxisType


class Step(NamedTuple):
    """One typed collective or cast: on which axis, from which type to which."""

    call: str
    mesh: Mesh | None  # None: `axis` is the name of a process group
    axis: str
    src: AxisType
    dst: AxisType
    site: str  # where it was called, if it was in a hook

    def __str__(self) -> str:
        return f"{self.call} over {self.axis!r}" + (f" at {self.site}" if self.site else "")


@dataclass(frozen=True)
class Note:
    """What happened to a gradient since backward made it."""

    steps: tuple[Step, ...] = ()
    # The count of writes to the tensor when it was noted; None where backward's additions
    # are watched, so that other writes (scaling) do not matter.
    version: int | None = None
    trouble: str = ""  # a key of TROUBLES: what is in it is not known
    by_us: bool = False  # reduce_gradients did it
    is_input: bool = False  # a collective read it; since then it must not be written

    def in_trouble(self, trouble: str) -> "Note":
        return replace(self, trouble=self.trouble or trouble)

    def watched(self) -> "Note":
        return replace(self, version=None)

    def effect(self) -> frozenset[tuple[Any, ...]]:
        """What two notes have in common if gradients that have them can be added."""
        last = {(step.mesh, step.axis): step.dst for step in self.steps}
        return frozenset(
            (*place, "RI" if t.letter in "RI" else t) for place, t in last.items()
        )


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
        "a hook reduced {gradient} ({step}) and returned another tensor than the result",
        "not known",
        "ops in a hook are not followed, so whether it was reduced is not known",
        "let the hook return the result of the collective as it is: "
        "all_reduce(g / n, axis, src=P, dst=R), not all_reduce(g, ...) / n",
    ),
    "written": Trouble(
        "{gradient} was reduced ({step}) and written in place since",
        "not known",
        "another backward may have added to it, so whether it is complete is not known",
        "scale it before it is reduced; reduce after the last backward",
    ),
    "copied": Trouble(
        "{gradient} was handed to a sum ({step}) and written in place since",
        "not known",
        "if the sum was copied into it a second one would count it once for every rank",
        "assign the sum (p.grad = all_reduce(p.grad, axis, src=P, dst=R)), or leave it to "
        "reduce_gradients(module); to look at a sum only, pass p.grad.clone()",
    ),
}  # fmt: skip

_NOTE = "_placements_gradient"


def note_of(tensor: Tensor) -> Note | None:
    """What is known to have happened to a gradient; a write that is not watched shows."""
    note = cast(Note | None, getattr(tensor, _NOTE, None))
    if note is None or note.version is None or note.version == version_of(tensor):
        return note
    return note.in_trouble("copied" if note.is_input else "written")


def put_note(tensor: Tensor, note: Note) -> None:
    setattr(tensor, _NOTE, note)


def note_move(
    x: Tensor, result: Tensor, call: str, mesh: Mesh | None, axis: str,
    src: AxisType, dst: AxisType,
) -> Note | None:  # fmt: skip
    """Note on a result that takes no gradient what a collective made of it."""
    if result.requires_grad or torch.compiler.is_compiling():
        return None
    step = Step(call, mesh, axis, src, dst, caller() if in_backward() else "")
    before = note_of(x)
    earlier = before if before is not None and not before.is_input else Note()
    note = replace(
        earlier, steps=(*earlier.steps, step), version=version_of(result), by_us=False
    )
    put_note(result, note)
    is_sum = src.letter == "P" and dst.letter in "RI"
    if before is None and is_sum and not x.requires_grad and tags.get(x) is None:
        put_note(x, Note((step,), version_of(x), is_input=True))
    return note


def reduced(wanted: TensorType, note: Note | None) -> TensorType:
    """What a gradient of type `wanted` is after what is noted.

    Raises Refusal if it is not what a collective took it for, or was reduced over ranks
    that the axes of its mesh cannot name.
    """
    if note is None or note.is_input or not note.steps:
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
            others.setdefault(step.mesh, {})[step.axis] = step
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
    if found != step.src and found.letter + step.src.letter not in ("RI", "IR"):
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
        done = [axis for axis in old if axis in steps]
        if not done:
            continue
        step = steps[done[0]]
        left = [axis for axis in old if axis not in steps]
        if left:
            raise Refusal(
                f"{step} of {mesh!r} covers only a part of the ranks of "
                f"{' and '.join(map(repr, new))}; {left[0]!r} is left out",
                new[0],
            )
        for axis in new:
            _take(types, axis, step)
