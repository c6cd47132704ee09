"""The pieces of the page: tables in a box of their own that scrolls, headings, errors."""

from collections.abc import Iterable, Sequence
from html import escape

from spmd_moe.checks.crossings import Crossing
from spmd_moe.cli.check_rows import HEADS, Numbers, crossing_cells, worth_showing


def paragraph(text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f"<p{kind}>{escape(text)}</p>"


def preformatted(text: str, label: str) -> str:
    """Show an error as it is, line by line."""
    return f'<pre tabindex="0" aria-label="{escape(label)}">{escape(text)}</pre>'


def crossings_table(crossings: Iterable[Crossing], caption: str) -> str:
    rows: list[list[str]] = []
    for row in worth_showing(crossings):
        cells = crossing_cells(row)
        rows.append([*cells[:4], "\n".join(cells.sent)])
    return table(caption, HEADS, rows)


def numbers_table(numbers: Numbers, caption: str) -> str:
    return table(caption, numbers.heads, numbers.rows, is_number=True, red=numbers.red)


def table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    is_number: bool = False,
    red: frozenset[tuple[int, int]] = frozenset(),
) -> str:
    """Return a table whose first column names the rows; a cell in `red` stands out."""
    column = ' class="number"' if is_number else ""
    first, *others = heads
    cells = [f'<th scope="col"{column}>{escape(head)}</th>' for head in others]
    lines = [f'<tr><th scope="col">{escape(first)}</th>{"".join(cells)}</tr>']
    body: list[str] = []
    for r, (name, *values) in enumerate(rows):
        shown = [
            f'<td class="number bad">{escape(value)}</td>'
            if (r, c) in red
            else f"<td{column}>{escape(value)}</td>"
            for c, value in enumerate(values, start=1)
        ]
        body.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(shown)}</tr>')
    label = escape(caption.partition("\n")[0])
    return "\n".join(
        [
            paragraph(caption, "caption"),  # above the box, so that it is not cut
            f'<div class="box" tabindex="0" role="region" aria-label="{label}">',
            f'<table aria-label="{label}">',
            "<thead>",
            *lines,
            "</thead><tbody>",
            *body,
            "</tbody></table></div>",
        ]
    )
