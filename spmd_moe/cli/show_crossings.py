"""The table of crossings: shapes, types and collectives of every tensor worth a row."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console

from placements.runtime.describe import short_dtype
from placements.runtime.ledger import Entry
from placements.types.axis import Shard
from spmd_moe.cli.crossings import ARGUMENT, BUFFER, RESULT, Crossing
from spmd_moe.cli.tables import Row, print_texts, say, size, width_of

HEADS = ("tensor", "global", "local", "type|gradient", "collectives")
FOLDED = (*HEADS[:3], "type|gradient, collectives")


def show_crossings(console: Console, title: str, crossings: Iterable[Crossing]) -> None:
    """Where five columns do not fit, collectives have lines of their own."""
    say(console, title, "bold")
    rows: list[Row] = []
    folded: list[Row] = []
    for row in _worth_showing(crossings):
        shapes = row.name, shape_text(row.global_shape), shape_text(row.local_shape)
        types = " ".join(f"{axis}:{_cell(row, axis)}" for axis in row.type)
        sent = _sent(row)
        rows.append((*shapes, types, "\n".join(sent)))
        folded.append((*shapes, "\n  ".join([types, *sent])))
    if width_of(HEADS, rows) <= console.width:
        print_texts(console, HEADS, rows)
    else:
        print_texts(console, FOLDED, folded)


def shape_text(shape: Sequence[int] | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "1"


def _worth_showing(crossings: Iterable[Crossing]) -> Iterator[Crossing]:
    """Without the index tensors inside functions, and what is there already."""
    seen: set[object] = set()
    for row in crossings:
        key = row.name, row.local_shape, row.type, row.has_gradient
        if row.role == ARGUMENT and (key in seen or not row.has_gradient):
            continue
        chosen = row.role == RESULT and row.of_method and row.dtype.startswith("int")
        sends = bool(row.forward or row.backward)
        if row.has_gradient or chosen or sends or row.role == BUFFER:
            seen.add(key)
            yield row


def _cell(row: Crossing, axis: str) -> str:
    here = _letter(row.type[axis])
    if row.gradient_type is None:
        return f"{here}|-"
    there = _letter(row.gradient_type[axis])
    return here if here == there else f"{here}|{there}"


def _letter(t: object) -> str:
    return f"S({t.dim})" if isinstance(t, Shard) else repr(t)


def _sent(row: Crossing) -> list[str]:
    forward = [_collective(entry, row) for entry in row.forward]
    return [*forward, *(f"<- {_collective(entry, row)}" for entry in row.backward)]


def _collective(entry: Entry, row: Crossing) -> str:
    """Its dtype is said where it is not that of the tensor."""
    text = f"{entry.kind} {entry.axis} {size(entry.nbytes)}"
    return text if entry.dtype == row.dtype else f"{text} {short_dtype(entry.dtype)}"
