"""Numbers as people read them, and the table of crossings."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from placements.ledger import Entry
from placements.types import Shard
from spmd_moe.cli.crossings import ARGUMENT, BUFFER, RESULT, Crossing
from spmd_moe.cli.terminal import WIDTH


def size(nbytes: float) -> str:
    """`640 B`, `1.2 KiB`, `56 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            digits = 0 if unit == "B" or nbytes >= 99.95 else 1
            return f"{nbytes:.{digits}f} {unit}"
        nbytes /= 1024
    raise AssertionError


def shape_text(shape: Sequence[int] | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "1"


def titled(console: Console, title: str, table: Table) -> None:
    """Print a table under its title, which may be the longer of the two."""
    console.print(title, style="bold", highlight=False)
    console.print(table)


def plain_table(*columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for k, column in enumerate(columns):
        table.add_column(column, justify="right" if k else "left", no_wrap=True)
    return table


LEGEND = """\
R|P is the type and that of the gradient where it differs, - where there is none; <- is in
backward. Where global is - every rank has rows of its own. Bytes are what rank 0 hands to
the collective, with all-to-alls as balanced routing makes them."""


def crossing_table(crossings: Iterable[Crossing]) -> Table:
    """Every tensor with its shapes, its type and its gradient's type on each axis."""
    rows = [
        (
            row.name, shape_text(row.global_shape), shape_text(row.local_shape),
            " ".join(f"{axis}:{_cell(row, axis)}" for axis in row.type), _sent(row),
        )
        for row in _worth_showing(crossings)
    ]  # fmt: skip
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = ("tensor", "global", "local", "type|gradient", "collectives")
    widths = [
        max(len(line) for cell in cells for line in cell.split("\n"))
        for cells in zip(columns, *rows, strict=True)
    ]
    # Names give way, numbers do not. There is a space around and between all columns.
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * len(columns) - 1)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, no_wrap=True, width=width, overflow="ellipsis")
    for row in rows:
        table.add_row(*row)
    return table


def _worth_showing(crossings: Iterable[Crossing]) -> Iterable[Crossing]:
    """Without the index tensors inside functions, and what is there already."""
    seen: set[object] = set()
    for row in crossings:
        key = row.name, row.local_shape, row.type, row.has_gradient
        if row.role == ARGUMENT and (key in seen or not row.has_gradient):
            continue
        chosen = row.role == RESULT and _of_method(row) and row.dtype.startswith("int")
        sends = bool(row.forward or row.backward)
        if row.has_gradient or chosen or sends or row.role == BUFFER:
            seen.add(key)
            yield row


def _of_method(row: Crossing) -> bool:
    """Whether a class declares the boundary: its last name but one is capitalised."""
    owner = row.where.split(".")[-2:-1]
    return bool(owner) and owner[0][:1].isupper()


def _cell(row: Crossing, axis: str) -> str:
    here = _letter(row.type[axis])
    if row.gradient_type is None:
        return f"{here}|-"
    there = _letter(row.gradient_type[axis])
    return here if here == there else f"{here}|{there}"


def _letter(t: object) -> str:
    return f"S({t.dim})" if isinstance(t, Shard) else repr(t)


def _sent(row: Crossing) -> str:
    forward = [_collective(entry) for entry in row.forward]
    backward = [f"<- {_collective(entry)}" for entry in row.backward]
    return "\n".join([*forward, *backward])


def _collective(entry: Entry) -> str:
    return f"{entry.kind} {entry.axis} {size(entry.nbytes)}"
