"""The check of the layer as people read it: crossings, bytes, differences, a verdict."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from spmd_moe.cli.check_layer import Result
from spmd_moe.cli.degrees import print_parallel
from spmd_moe.cli.simulate import TOLERANCE, Simulated
from spmd_moe.cli.tables import LEGEND, crossing_table, plain_table, size, titled
from spmd_moe.cli.trace import Trace
from spmd_moe.layouts import CONFIGURATIONS, configuration


def show(console: Console, results: Sequence[Result], tables: Sequence[Result]) -> None:
    """Crossings of `tables`, then bytes and differences of all."""
    for result in tables:
        titled(console, _title(result.trace), crossing_table(result.trace.crossings))
    console.print(f"{LEGEND}\n", highlight=False)
    titled(
        console,
        "Bytes that rank 0 hands to collectives in one step (/ how many, if not one)",
        _bytes_table([result.trace for result in results]),
    )
    runs = [result.run for result in results if result.run is not None]
    if runs:
        titled(console, _run_title(runs[0]), _difference_table(runs))
    console.print(_verdict(results), highlight=False)


def _run_title(run: Simulated) -> str:
    config, work = run.config, run.work
    return (
        "Largest difference from one device, relative to the largest value, float64;\n"
        f"{run.parallel.num_ranks} simulated ranks, dim {config.dim}, "
        f"hidden {config.hidden_dim}, {config.num_experts} experts, "
        f"{work.batch} x {work.seq_len} tokens on every dp rank"
    )


def _title(found: Trace) -> str:
    name = found.configuration
    return f"{name} ({CONFIGURATIONS[name]}) on {print_parallel(found.parallel)}"


PHASES = ("", "backward", "of gradients")


def _bytes_table(traces: Sequence[Trace]) -> Table:
    """Bytes by collective and configuration."""
    columns = [_grouped(one) for one in traces]
    table = plain_table("collective", *(one.configuration for one in traces))
    keys = dict.fromkeys(key for column in columns for key in column)
    for phase, axis, kind in sorted(keys):
        cells = [_bytes_cell(column.get((phase, axis, kind), [])) for column in columns]
        table.add_row(f"{axis} {kind} {PHASES[phase]}", *cells)
    return table


def _grouped(found: Trace) -> dict[tuple[int, str, str], list[int]]:
    """(phase, axis, kind) -> the bytes of each collective."""
    groups: dict[tuple[int, str, str], list[int]] = {}
    for entry in found.collectives:
        key = int(entry.backward), entry.axis, entry.kind
        groups.setdefault(key, []).append(entry.nbytes)
    for entry in found.gradient_sums:
        groups.setdefault((2, entry.axis, entry.kind), []).append(entry.nbytes)
    return groups


def _bytes_cell(sizes: Sequence[int]) -> str:
    if not sizes:
        return ""
    return size(sum(sizes)) + (f"/{len(sizes)}" if len(sizes) > 1 else "")


def _difference_table(runs: Sequence[Simulated]) -> Table:
    table = plain_table("tensor", *(configuration(run.parallel) for run in runs))
    for name in runs[0].differences:
        label = name if name == "output" else f"gradient of {name}"
        table.add_row(label, *(_difference_cell(run.differences[name]) for run in runs))
    return table


def _difference_cell(found: float) -> str:
    text = f"{found:.0e}" if math.isfinite(found) else "differs in shape"
    return text if found <= TOLERANCE else f"[bold red]{text}[/]"


def _verdict(results: Sequence[Result]) -> str:
    failed = [result.trace.configuration for result in results if not result.passed]
    ran = [result.trace.configuration for result in results if result.run is not None]
    ranks = results[0].trace.ranks
    lines = [f"{_names(results)}: every op type-checks on {_many(ranks, 'rank')}."]
    if failed:
        lines.append(f"FAILED: {', '.join(failed)} (the tolerance is {TOLERANCE:.0e}).")
    elif ran:
        lines.append(
            "Output and gradients are those of one device. Rank 0 sent what the trace "
            "said, but for\nthe rows of all-to-alls: how many they are depends on the data."
        )
    if len(ran) < len(results):
        left = [r for r in results if r.run is None]
        lines.append(
            f"{_names(left)}: too large to run here, so nothing was computed. --scale-down "
            "runs a small layer\nthat is cut in the same way, if there is one."
        )
    return "\n".join(lines)


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _names(results: Sequence[Result]) -> str:
    return ", ".join(result.trace.configuration for result in results)
