"""The check of the layer as people read it: crossings, bytes, differences, a verdict."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Console

from spmd_moe.cli import legends
from spmd_moe.cli.check_layer import Result
from spmd_moe.cli.degrees import print_parallel
from spmd_moe.cli.show_crossings import show_crossings
from spmd_moe.cli.simulate import OUTPUT, Simulated
from spmd_moe.cli.tables import Row, print_numbers, say, size
from spmd_moe.cli.trace import Trace
from spmd_moe.layouts import CONFIGURATIONS, configuration


def show(console: Console, results: Sequence[Result], tables: Sequence[Result]) -> None:
    """Crossings of `tables`, then bytes and differences of all, and the verdict."""
    for result in tables:
        show_crossings(console, _title(result.trace), result.trace.crossings)
    say(console, f"{legends.CROSSINGS}\n")
    title = "Bytes that rank 0 hands to collectives in one step (/ how many, if not one)"
    say(console, title, "bold")
    _show_bytes(console, [result.trace for result in results])
    say(console, f"{legends.GRADIENT_SUMS}\n")
    runs = [result.run for result in results if result.run is not None]
    if runs:
        say(console, _run_title(runs[0]), "bold")
        _show_differences(console, runs)
    for line in _verdict(results):
        say(console, line)


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


def _show_bytes(console: Console, traces: Sequence[Trace]) -> None:
    """Bytes by collective and configuration."""
    columns = [_grouped(one) for one in traces]
    rows: list[Row] = []
    for key in sorted({key for column in columns for key in column}):
        phase, axis, kind = key
        cells = [_bytes_cell(column.get(key, [])) for column in columns]
        rows.append([f"{axis} {kind} {PHASES[phase]}".rstrip(), *cells])
    print_numbers(console, ["collective", *(one.configuration for one in traces)], rows)


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


def _show_differences(console: Console, runs: Sequence[Simulated]) -> None:
    names = list(runs[0].differences)
    rows: list[Row] = [
        [
            name if name == OUTPUT else f"gradient of {name}",
            *(_difference_cell(run.differences[name]) for run in runs),
        ]
        for name in names
    ]
    red = {
        (r, c)
        for r, name in enumerate(names)
        for c, run in enumerate(runs, start=1)
        if not run.differences[name] <= run.tolerance
    }
    heads = ["tensor", *(configuration(run.parallel) for run in runs)]
    print_numbers(console, heads, rows, red=frozenset(red))


def _difference_cell(found: float) -> str:
    return f"{found:.0e}" if math.isfinite(found) else "differs in shape"


def _verdict(results: Sequence[Result]) -> Iterator[str]:
    ran = [result for result in results if result.run is not None]
    ranks = results[0].trace.ranks
    yield f"{_names(results)}: every op type-checks on {_many(ranks, 'rank')}."
    for result in ran:
        name = result.trace.configuration
        if result.run is not None and not result.run.agrees:
            said = f"the tolerance is {result.run.tolerance:.0e}"
            yield f"FAILED: {name}: numbers differ from those of one device ({said})."
        if result.sent_otherwise:
            said = "; ".join(result.sent_otherwise)
            yield f"FAILED: {name}: rank 0 sent otherwise than traced: {said}."
    if ran and all(result.passed for result in ran):
        yield (
            "Output and gradients are those of one device. Rank 0 sent what the trace "
            "said, but for the rows of all-to-alls: how many they are depends on the data."
        )
    left = [result for result in results if result.run is None]
    if left:
        yield (
            f"{_names(left)}: too large to run here, so nothing was computed. --scale-down "
            "runs a small layer that is cut in the same way, if there is one."
        )


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _names(results: Sequence[Result]) -> str:
    return ", ".join(result.trace.configuration for result in results)
