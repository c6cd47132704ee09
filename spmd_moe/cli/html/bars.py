"""Draw how many rows each expert computed on each rank of the run, as bars."""

from collections.abc import Sequence
from html import escape

ROW, LABEL, FULL, WIDTH = 18, 40, 150, 240


def bars(rows: Sequence[Sequence[int | None]]) -> str:
    """Return a card for each rank, with a bar for each of its experts; one scale."""
    most = max((n for rank in rows for n in rank if n is not None), default=0)
    cards = [_card(rank, counts, most) for rank, counts in enumerate(rows)]
    return f'<div class="ranks">{"".join(cards)}</div>'


def _card(rank: int, counts: Sequence[int | None], most: int) -> str:
    held = [(expert, n) for expert, n in enumerate(counts) if n is not None]
    total = sum(n for _, n in held)
    said = ", ".join(f"expert {expert}: {n}" for expert, n in held)
    parts = [
        f'<div class="rank"><h4>rank {rank}: {total} rows</h4>'
        f'<svg class="bars" role="img" viewBox="0 0 {WIDTH} {ROW * len(held)}" '
        f'aria-label="{escape(f"rows on rank {rank}: {said}")}">'
    ]
    for place, (expert, n) in enumerate(held):
        y = ROW * place
        length = round(FULL * n / most, 1) if most else 0
        parts.append(
            f'<text x="0" y="{y + 13}">{expert}</text>'
            f'<rect x="{LABEL}" y="{y + 3}" width="{length}" height="{ROW - 6}"/>'
            f'<text x="{LABEL + length + 6}" y="{y + 13}">{n}</text>'
        )
    return "".join([*parts, "</svg></div>"])
