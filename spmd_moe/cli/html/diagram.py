"""Draw the boxes of a trace as SVG, and the edges along which tensors go.

There are two arrangements of the same boxes. `WIDE` has a lane for each mesh, side by side;
`NARROW` has one column, in which the boxes of the second mesh are indented. An edge to the
box right below is straight; every other one goes through a gutter, each on its own track.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from spmd_moe.cli.html.boxes import Box, Line

TITLE, LINE, PAD, GAP = 18, 15, 6, 22  # heights
CHARACTER = 6.7  # width of one, in the font of the lines
TRACK = 8  # between edges in a gutter


@dataclass(frozen=True)
class Arrangement:
    """Where the lanes are, how wide a box is, and the gutter of each pair of lanes."""

    name: str
    width: int
    lanes: tuple[int, int]  # x of the boxes on the first mesh and on the others
    box: int
    side_by_side: bool


NARROW = Arrangement("narrow", 360, (44, 62), 296, side_by_side=False)
WIDE = Arrangement("wide", 760, (44, 432), 296, side_by_side=True)


@dataclass(frozen=True)
class _Placed:
    box: Box
    lane: int
    x: int
    y: int
    height: int
    above: int | None  # the box right above it, from which an edge is straight


def diagram(boxes: Sequence[Box], name: str, where: Arrangement, said: str) -> str:
    """Return an <svg> with a title and a description; `name` makes its ids unique."""
    placed = _placed(boxes, where)
    meshes = list(dict.fromkeys(box.mesh for box in boxes))
    bottom = max((one.y + one.height for one in placed), default=0) + 8
    tail = f"{name}-{where.name}"
    head = (
        f'<svg class="diagram {where.name}" role="img" viewBox="0 0 {where.width} {bottom}"'
        f' xmlns="http://www.w3.org/2000/svg" aria-labelledby="{tail}-title {tail}-desc">'
        f'<title id="{tail}-title">{escape(said)}</title>'
        f'<desc id="{tail}-desc">{escape(described(boxes))}</desc>'
        f"<defs>{_arrow_head(tail, '')}{_arrow_head(tail, ' crosses')}</defs>"
    )
    parts = [head, *_headings(meshes, where)]
    parts += _edges(placed, where, tail)
    parts += [_drawn(one, where) for one in placed]
    return "\n".join([*parts, "</svg>"])


def _arrow_head(tail: str, crosses: str) -> str:
    return (
        f'<marker id="{tail}-head{crosses.strip()}" viewBox="0 0 8 8" refX="7" refY="4" '
        'markerWidth="10" markerHeight="10" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path class="head{crosses}" d="M0 0 8 4 0 8z"/></marker>'
    )


def described(boxes: Sequence[Box]) -> str:
    """Say in words what the diagram shows."""
    said = [
        f"{box.title} on {box.mesh}: "
        + "; ".join(f"{line.text} {line.more}".rstrip() for line in box.lines)
        for box in boxes
    ]
    return ". ".join(said) + "."


def _placed(boxes: Sequence[Box], where: Arrangement) -> list[_Placed]:
    """Put every box below those that it comes from, and below those of its lane."""
    meshes = list(dict.fromkeys(box.mesh for box in boxes))
    top = 10 + 16 * (1 if where.side_by_side else len(meshes))
    placed: list[_Placed] = []
    lowest: dict[int, int] = {}  # lane -> the last box in it
    for place, box in enumerate(boxes):
        lane = min(meshes.index(box.mesh), 1)
        column = lane if where.side_by_side else 0
        above = lowest.get(column)
        before = [*box.sources, *([] if above is None else [above])]
        if box is boxes[-1] and not box.sources:  # the end, after all others
            before = list(range(place))
        ends = [placed[k].y + placed[k].height for k in before]
        y = max(ends) + GAP if ends else top
        if place and not box.sources:  # not higher than what runs before it
            y = max(y, placed[-1].y)
        height = TITLE + 2 * PAD + LINE * sum(_rows(line, where.box) for line in box.lines)
        placed.append(_Placed(box, lane, where.lanes[lane], y, height, above))
        lowest[column] = place
    return placed


def _fits(line: Line, width: int) -> bool:
    return (len(line.text) + 2 + len(line.more)) * CHARACTER <= width - 20


def _rows(line: Line, width: int) -> int:
    return 1 if not line.more or _fits(line, width) else 2


def _headings(meshes: Sequence[str], where: Arrangement) -> list[str]:
    found: list[str] = []
    for number, mesh in enumerate(meshes):
        lane = min(number, 1)
        named = "mesh" if len(meshes) == 1 else ("dense mesh", "sparse mesh")[lane]
        x, y = where.lanes[lane], 18 if where.side_by_side else 14 + 16 * number
        swatch = f'<rect class="swatch mesh{lane}" x="{x}" y="{y - 10}" width="11" '
        found.append(
            f'{swatch}height="11" rx="2"/>'
            f'<text class="mesh" x="{x + 17}" y="{y}">{named} {escape(mesh)}</text>'
        )
    return found


def _drawn(one: _Placed, where: Arrangement) -> str:
    box, x, y = one.box, one.x, one.y
    kind = "collective" if box.is_collective else "stage"
    corner = 12 if box.is_collective else 4
    parts = [
        f'<g class="{kind} mesh{one.lane}">',
        f'<rect x="{x}" y="{y}" width="{where.box}" height="{one.height}" rx="{corner}"/>',
        f'<text class="name" x="{x + 10}" y="{y + PAD + 12}">{_cut(box.title, where)}'
        "</text>",
    ]
    at = y + PAD + TITLE + 11
    for line in box.lines:
        left = f'<text class="{line.style}" x="{x + 10}" y="{at}">'
        parts.append(f"{left}{_cut(line.text, where)}</text>")
        if line.more:
            at += 0 if _fits(line, where.box) else LINE
            right = f'<text class="{line.style} end" x="{x + where.box - 10}" y="{at}">'
            parts.append(f"{right}{_cut(line.more, where)}</text>")
        at += LINE
    return "".join([*parts, "</g>"])


def _cut(text: str, where: Arrangement) -> str:
    """Escape a text, with an ellipsis if it is too long and the whole as its tooltip."""
    room = int((where.box - 20) / CHARACTER)
    if len(text) <= room:
        return escape(text)
    return f"{escape(text[: room - 1])}…<title>{escape(text)}</title>"


def _edges(placed: Sequence[_Placed], where: Arrangement, tail: str) -> list[str]:
    taken: dict[str, list[tuple[int, int, int]]] = {}  # gutter -> track, from y, to y
    found: list[str] = []
    for target in placed:
        arriving = 0  # edges that enter at the side, one below the other
        for place in sorted(target.box.sources, reverse=True):
            source = placed[place]
            if place == target.above:
                middle = max(source.x, target.x) + where.box // 2
                path = f"M{middle} {source.y + source.height}V{target.y - 1}"
            else:
                path = _around(source, target, arriving, where, taken)
                arriving += 1
            crosses = " crosses" if source.lane != target.lane else ""
            head = f"{tail}-head{crosses.strip()}"
            found.append(
                f'<path class="edge{crosses}" d="{path}" marker-end="url(#{head})"/>'
            )
    return found


def _around(
    source: _Placed,
    target: _Placed,
    arriving: int,
    where: Arrangement,
    taken: dict[str, list[tuple[int, int, int]]],
) -> str:
    """Lead an edge through a gutter: between the lanes, or outside of them."""
    start, end = source.y + source.height - 9, target.y + 12 + 10 * arriving
    if where.side_by_side and source.lane != target.lane:
        gutter, first, step = "between", where.lanes[0] + where.box + 20, TRACK
    elif where.side_by_side and source.lane == 1:
        gutter, first, step = "right", where.lanes[1] + where.box + 8, TRACK
    else:
        gutter, first, step = "left", where.lanes[0] - 12, -TRACK
    tracks = taken.setdefault(gutter, [])
    track = 0
    while any(t == track and start < b and a < end for t, a, b in tracks):
        track += 1
    tracks.append((track, start, end))
    x = min(max(first + step * track, 3), where.width - 3)  # many share the last track
    leaves, enters = source.x, target.x
    if gutter == "right" or (gutter == "between" and source.lane == 0):
        leaves += where.box
    if gutter == "right" or (gutter == "between" and target.lane == 0):
        enters += where.box + 1
    else:
        enters -= 1
    return f"M{leaves} {start}H{x}V{end}H{enters}"
