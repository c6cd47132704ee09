"""Make the boxes of the diagram from a trace: one for each stage and each collective.

Tensors of one stage and one mesh that follow each other share a box. The edges between the
boxes are those of autograd's graph, as the trace has them; a tensor that the tables leave
out is passed over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from placements.runtime.ledger import Entry
from spmd_moe.checks.crossings import BUFFER, COLLECTIVE, PARAMETER, Crossing
from spmd_moe.cli.check_rows import (
    gradient_sums_text,
    sent_text,
    shape_text,
    types_text,
    worth_showing,
)

STATE = (PARAMETER, BUFFER)


@dataclass(frozen=True)
class Line:
    """One tensor of a box, or one collective."""

    text: str
    more: str = ""
    style: str = "tensor"  # or "state", "forward", "backward"


@dataclass
class Box:
    """A stage or a collective, on the mesh of its tensors."""

    title: str
    mesh: str
    is_collective: bool = False
    lines: list[Line] = field(default_factory=list[Line])
    sources: set[int] = field(default_factory=set[int])  # places of other boxes


def boxes_of(crossings: Sequence[Crossing], sums: Sequence[Entry] = ()) -> list[Box]:
    """Return the boxes in the order in which the program runs, the sums at the end."""
    boxes: list[Box] = []
    box_of: dict[int, int] = {}  # place of a crossing -> place of its box
    wanted = {id(row) for row in worth_showing(crossings)}
    shown = [place for place, row in enumerate(crossings) if id(row) in wanted]
    for place, made in zip(shown, _boxes_for([crossings[k] for k in shown]), strict=True):
        if not boxes or _key(made) != _key(boxes[-1]) or made.is_collective:
            boxes.append(made)
        boxes[-1].lines += _lines(crossings[place])
        box_of[place] = len(boxes) - 1
    for place, box in box_of.items():
        boxes[box].sources |= _boxes_before(place, crossings, box_of) - {box}
    if sums:
        lines = [Line(text, style="backward") for text in gradient_sums_text(sums)]
        boxes.append(Box("after backward: sums of gradients", boxes[0].mesh, True, lines))
    return boxes


def mesh_text(row: Crossing) -> str:
    """Return `dp=2, tp=2`: the axes that the type names, with their sizes."""
    return ", ".join(f"{axis}={row.type.mesh.sizes[axis]}" for axis in row.type)


def _boxes_for(rows: Sequence[Crossing]) -> list[Box]:
    """Return the box of each row; state in the midst of a stage is in its box."""
    own = [_box_for(row) for row in rows]
    found = list(own)
    before = 0  # the last row that is no state
    for place, row in enumerate(rows):
        if row.role in STATE:
            continue
        if _key(own[before]) == _key(own[place]):
            found[before:place] = [own[before]] * (place - before)
        before = place
    return found


def _box_for(row: Crossing) -> Box:
    if row.role == COLLECTIVE:
        return Box(row.name, mesh_text(row), is_collective=True)
    return Box(_stage(row), mesh_text(row))


def _key(box: Box) -> tuple[str, str, bool]:
    return box.title, box.mesh, box.is_collective


def _stage(row: Crossing) -> str:
    """`a.route.Router.score` -> `Router`, `a.combine.combine` -> `combine`."""
    *path, last = row.where.split(".")
    return path[-1] if path else last


def _lines(row: Crossing) -> list[Line]:
    shape, types = shape_text(row.local_shape), types_text(row)
    if row.role in STATE:
        return [Line(f"{row.name} {shape}", types, "state")]
    if row.role != COLLECTIVE:
        return [Line(f"{row.name} {shape}", types)]
    forward = [Line(f"forward: {sent_text(e, row)}", style="forward") for e in row.forward]
    backward = [
        Line(f"backward: {sent_text(e, row)}", style="backward") for e in row.backward
    ]
    return [*forward, *backward, Line(f"gives {shape}", types)]


def _boxes_before(
    place: int, crossings: Sequence[Crossing], box_of: dict[int, int]
) -> set[int]:
    found: set[int] = set()
    for source in crossings[place].sources:
        if source in box_of:
            found.add(box_of[source])
        else:
            found |= _boxes_before(source, crossings, box_of)
    return found
