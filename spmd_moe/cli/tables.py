"""Print tables and paragraphs as wide as the console; numbers are never cut."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Cells = Sequence[str]


def size(nbytes: float) -> str:
    """Print a number of bytes as `640 B`, `1.2 KiB`, `56 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if nbytes < 1024 or unit == "TiB":
            digits = 0 if unit == "B" or nbytes >= 99.95 else 1
            return f"{nbytes:.{digits}f} {unit}"
        nbytes /= 1024
    raise AssertionError


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, wrapped at words."""
    console.print(text, style=style, highlight=False, markup=False)


def print_numbers(
    console: Console,
    heads: Cells,
    rows: Sequence[Cells],
    *,
    keys: int = 1,
    text: int = 1,
    red: frozenset[tuple[int, int]] = frozenset(),
) -> None:
    """Print numbers below heads; the first `text` columns are text.

    If the console is too narrow, columns go on in a second table, which repeats the first
    `keys`. `red`: (row, column) of the cells that stand out.
    """
    widths = widths_of(heads, rows)
    for columns in _pieces(widths, keys, console.width):
        table = _table(sum(widths[c] + 2 for c in columns) + 1)
        for c in columns:
            table.add_column(
                heads[c], justify="left" if c < text else "right", no_wrap=True
            )
        for r, row in enumerate(rows):
            cells = [Text(row[c], "bold red" if (r, c) in red else "") for c in columns]
            table.add_row(*cells)
        console.print(table, crop=False)


def print_texts(console: Console, heads: Cells, rows: Sequence[Cells]) -> None:
    """Print columns of text: only the first gives way, over several lines."""
    first, *others = widths_of(heads, rows)
    least = len(heads[0])
    others_take = sum(others) + 2 * len(heads) + 1
    first = max(least, min(first, console.width - others_take))
    table = _table(first + others_take)
    for head, width in zip(heads, (first, *others), strict=True):
        table.add_column(head, width=width, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table, crop=False)


def widths_of(heads: Cells, rows: Sequence[Cells]) -> list[int]:
    return [
        max(len(line) for cell in cells for line in cell.split("\n"))
        for cells in zip(heads, *rows, strict=True)
    ]


def width_of(heads: Cells, rows: Sequence[Cells]) -> int:
    """Return the width of the table: a space around it, two between columns."""
    return sum(widths_of(heads, rows)) + 2 * len(heads) + 1


def _table(width: int) -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), width=width)


def _pieces(widths: Sequence[int], keys: int, width: int) -> list[list[int]]:
    """Return the columns of each table: the keys, and as many others as fit."""
    first = list(range(keys))
    pieces = [list(first)]
    for c in range(keys, len(widths)):
        wanted = [*pieces[-1], c]
        if len(wanted) > keys + 1 and sum(widths[k] + 2 for k in wanted) + 1 > width:
            wanted = [*first, c]
            pieces.append(wanted)
        pieces[-1] = wanted
    return pieces
