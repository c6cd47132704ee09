"""The tables of a run, for the terminal and for a page, and its plot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

Row = tuple[str, ...]
HEAD_LAYER: Row = (
    "shape", "dtype", "direction", "ours ms", "over the limit", "best peer", "ratio",
    "95 %", "memory over leanest",
)  # fmt: skip
HEAD_RANKS: Row = (
    "ranks",
    "shape",
    "direction",
    "ours ms",
    "ratio",
    "95 %",
    "bytes a rank",
)
HEAD_PATHS: Row = (
    "fast path", "ranks", "tokens a rank, dim", "plain ms", "fast / plain", "95 %", "bytes",
)  # fmt: skip
HEAD_GROWTH: Row = ("grows", "direction", "size: ms")


def layer_rows(records: list[dict[str, Any]]) -> list[Row]:
    """A line for each shape, dtype and direction."""
    return [
        (
            r["shape"]["name"], r["dtype"], r["direction"], ms(r["seconds"]["ours"]),
            f"{r['seconds']['ours'] / max(r['limits'].values()):.2f}"
            f" ({max(r['limits'], key=r['limits'].get)})",
            f"{r['best_peer']}", f"{r['ratio']['median']:.2f}",
            f"{r['ratio']['upper']:.2f}", f"{memory(r):.2f}",
        )
        for r in records
    ]  # fmt: skip


def memory(record: dict[str, Any]) -> float:
    """Peak of ours over that of the leanest of the peers that are nearly the fastest."""
    seconds, peaks = record["seconds"], record["peak_bytes"]
    limit = 1.1 * seconds[record["best_peer"]]
    near = [p for n, p in peaks.items() if n != "ours" and seconds[n] <= limit]
    return peaks["ours"] / max(min(near), 1)


def rank_rows(records: list[dict[str, Any]]) -> list[Row]:
    return [
        (
            str(r["ranks"]), r["shape"]["name"], r["direction"], ms(r["seconds"]["ours"]),
            f"{r['ratio']['median']:.2f}", f"{r['ratio']['upper']:.2f}",
            f"{max(r['bytes']):,}",
        )
        for r in records
    ]  # fmt: skip


def path_rows(records: list[dict[str, Any]]) -> list[Row]:
    return [
        (
            r["path"], str(r["ranks"]), f"{r['tokens']}, {r['dim']}",
            ms(r["seconds"]["plain"]), f"{r['ratio']['median']:.2f}",
            f"{r['ratio']['upper']:.2f}", f"{r['bytes'][0]:,} to {r['bytes'][1]:,}",
        )
        for r in records
    ]  # fmt: skip


def growth_rows(records: list[dict[str, Any]]) -> list[Row]:
    lines: dict[tuple[str, str], list[str]] = {}
    for r in records:
        line = lines.setdefault((r["grows"], r["direction"]), [])
        line.append(f"{r['size']}: {ms(r['seconds'])}")
    return [(*key, ", ".join(line)) for key, line in lines.items()]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def tables(run: dict[str, Any]) -> list[tuple[str, Row, list[Row]]]:
    """The table of each part that was run: title, head, lines."""
    parts: dict[str, tuple[str, Row, Callable[[list[dict[str, Any]]], list[Row]]]] = {
        "layer": ("The layer in one process", HEAD_LAYER, layer_rows),
        "ranks": ("Between ranks, over the textbook layer", HEAD_RANKS, rank_rows),
        "paths": ("Fast paths, over the plain path", HEAD_PATHS, path_rows),
        "growth": ("Growth", HEAD_GROWTH, growth_rows),
    }
    return [
        (title, head, lines(run[part]))
        for part, (title, head, lines) in parts.items()
        if run.get(part)
    ]


def printed(title: str, head: Row, rows: list[Row]) -> Table:
    table = Table(*head, title=title)
    for row in rows:
        table.add_row(*row)
    return table


def markdown(run: dict[str, Any]) -> str:
    """The tables as they stand in `docs/speed.md`."""
    text: list[str] = []
    for title, head, rows in tables(run):
        text += [f"### {title}", "", "| " + " | ".join(head) + " |"]
        text += ["|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows), ""]
    return "\n".join(text)


def plot(run: dict[str, Any], path: Path) -> bool:
    """Draw each layer over the limit of its shape; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [
        (d, k) for d in ("float32", "bfloat16") for k in ("forward", "forward+backward")
    ]
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharey=True, squeeze=False)
    for (dtype, direction), axis in zip(cases, axes.flat, strict=True):
        records = [
            r for r in run["layer"] if (r["dtype"], r["direction"]) == (dtype, direction)
        ]
        for name in dict.fromkeys(n for r in records for n in r["seconds"]):
            # One that was left out of a shape has no point there.
            over = [
                r["seconds"].get(name, float("nan")) / max(r["limits"].values())
                for r in records
            ]
            axis.plot(range(len(over)), over, "o-" if name == "ours" else ".--", label=name)
        axis.set(title=f"{dtype}, {direction}", yscale="log", ylabel="time over the limit")
        labels = [r["shape"]["name"].replace(", ", "\n") for r in records]
        axis.set_xticks(range(len(labels)), labels, fontsize=7)
        axis.axhline(1, color="gray", linewidth=0.8)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    return True
