"""Print what `spmd-moe check` found: crossings, bytes, differences, meshes, a verdict."""

from collections.abc import Iterable, Sequence

from rich.console import Console

from spmd_moe.checks.configurations import Result
from spmd_moe.checks.crossings import Crossing
from spmd_moe.checks.meshes import Candidate
from spmd_moe.cli.check_rows import (
    BYTES_TITLE,
    CROSSINGS_LEGEND,
    GRADIENT_SUMS_LEGEND,
    HEADS,
    Numbers,
    bytes_table,
    crossing_cells,
    differences_table,
    run_title,
    title_of,
    verdict,
    worth_showing,
)
from spmd_moe.cli.tables import Cells, print_numbers, print_texts, say, size, width_of

FOLDED = (*HEADS[:3], "type|gradient, collectives")
MESHES_SHOWN = 24  # rows of the table of meshes; --json has all

# What the table of meshes means.
MESHES_LEGEND = (
    "memory: what one rank keeps for this layer: weights, as much for gradients, AdamW "
    "(two tensors like each weight, as torch.optim.AdamW has them), activ. (what autograd "
    "keeps from forward to backward). Weights are whole on dp and cp (no FSDP). forward, "
    "backward, reduce (of gradients): bytes that one rank puts on the wire, by rings: "
    "all-reduce 2(n-1)/n of its tensor, reduce-scatter and all-to-all (n-1)/n, all-gather "
    "n-1 times its piece. Routing is taken as balanced."
)


def show_layer(
    console: Console, results: Sequence[Result], tables: Sequence[Result]
) -> None:
    """Print crossings of `tables`, then bytes and differences of all, and the verdict."""
    for result in tables:
        show_crossings(console, title_of(result.trace), result.trace.crossings)
    say(console, f"{CROSSINGS_LEGEND}\n")
    say(console, BYTES_TITLE, "bold")
    _show_numbers(console, bytes_table([result.trace for result in results]))
    say(console, f"{GRADIENT_SUMS_LEGEND}\n")
    runs = [result.run for result in results if result.run is not None]
    if runs:
        say(console, run_title(runs[0]), "bold")
        _show_numbers(console, differences_table(runs))
    for line in verdict(results):
        say(console, line)


def _show_numbers(console: Console, table: Numbers) -> None:
    print_numbers(console, table.heads, table.rows, red=table.red)


def show_crossings(console: Console, title: str, crossings: Iterable[Crossing]) -> None:
    """Print shapes, types and collectives of every tensor worth a row.

    Where five columns do not fit, collectives have lines of their own.
    """
    say(console, title, "bold")
    rows: list[Cells] = []
    folded: list[Cells] = []
    for row in worth_showing(crossings):
        cells = crossing_cells(row)
        rows.append((*cells[:4], "\n".join(cells.sent)))
        folded.append((*cells[:3], "\n  ".join([cells.types, *cells.sent])))
    if width_of(HEADS, rows) <= console.width:
        print_texts(console, HEADS, rows)
    else:
        print_texts(console, FOLDED, folded)


def show_candidates(console: Console, candidates: Sequence[Candidate]) -> None:
    """Print one row for each mesh: its degrees, its memory, and what it sends."""
    heads = (
        "dp", "tp", "ep", "etp", "sp", "weights", "AdamW", "activ.", "memory",
        "forward", "backward", "reduce",
    )  # fmt: skip
    rows: list[list[str]] = []
    for candidate in candidates:
        memory, mesh = candidate.memory, candidate.parallel
        kept = memory.parameters, memory.optimizer, memory.activations, memory.total
        sent = candidate.forward, candidate.backward, candidate.gradient_sums
        degrees = map(str, (mesh.dp, mesh.tp, mesh.ep, mesh.etp))
        sp = "on" if mesh.sequence_parallel else "off"
        rows.append([*degrees, sp, *map(size, (*kept, *sent))])
    print_numbers(console, heads, rows, keys=5, text=0)
