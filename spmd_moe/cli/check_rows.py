"""What the tables of `spmd-moe check` say, cell by cell, wherever they are shown."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from placements import Shard
from placements.runtime.describe import short_dtype
from placements.runtime.ledger import Entry
from spmd_moe.checks.configurations import Result
from spmd_moe.checks.crossings import ARGUMENT, BUFFER, RESULT, Crossing
from spmd_moe.checks.simulate import OUTPUT, Simulated
from spmd_moe.checks.trace import Trace
from spmd_moe.cli.degrees import print_parallel
from spmd_moe.cli.tables import Cells, size
from spmd_moe.layouts import CONFIGURATIONS, configuration

PHASES = ("", "backward", "of gradients")
HEADS = ("tensor", "global", "local", "type|gradient", "collectives")
BYTES_TITLE = "Bytes that rank 0 hands to collectives in one step (/ how many, if not one)"

# What the tables mean: a paragraph each, wrapped where it is shown.
CROSSINGS_LEGEND = (
    "R|P is the type and that of the gradient where it differs, - where there is none; <- "
    "is in backward. Where global is - every rank has rows of its own. Bytes are what rank "
    "0 hands to the collective, with all-to-alls as balanced routing makes them."
)

GRADIENT_SUMS_LEGEND = (
    "Sums of gradients carry one number more for each gradient: on how many ranks there is "
    "one."
)


class Numbers(NamedTuple):
    """A table of numbers; `red` has the (row, column) of what stands out."""

    heads: list[str]
    rows: list[Cells]
    red: frozenset[tuple[int, int]] = frozenset()


class CrossingCells(NamedTuple):
    """The row of a tensor; `sent` has a line for each collective."""

    name: str
    global_shape: str
    local_shape: str
    types: str
    sent: list[str]


def run_title(run: Simulated) -> str:
    config, work = run.config, run.work
    return (
        "Largest difference from one device, relative to the largest value, float64;\n"
        f"{run.parallel.num_ranks} simulated ranks, dim {config.dim}, "
        f"hidden {config.hidden_dim}, {config.num_experts} experts, "
        f"{work.batch} x {work.seq_len} tokens on every dp rank"
    )


def title_of(found: Trace) -> str:
    name = found.configuration
    return f"{name} ({CONFIGURATIONS[name]}) on {print_parallel(found.parallel)}"


def bytes_table(traces: Sequence[Trace]) -> Numbers:
    """Return bytes by collective and configuration."""
    columns = [_grouped(one) for one in traces]
    rows: list[Cells] = []
    for key in sorted({key for column in columns for key in column}):
        phase, axis, kind = key
        cells = [_bytes_cell(column.get(key, [])) for column in columns]
        rows.append([f"{axis} {kind} {PHASES[phase]}".rstrip(), *cells])
    return Numbers(["collective", *(one.configuration for one in traces)], rows)


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


def gradient_sums_text(sums: Iterable[Entry]) -> list[str]:
    """Return a line for each axis and kind, `all-reduce dp 3.5 KiB/2`."""
    groups: dict[tuple[str, str], list[int]] = {}
    for entry in sums:
        groups.setdefault((entry.axis, entry.kind), []).append(entry.nbytes)
    return [f"{kind} {axis} {_bytes_cell(sizes)}" for (axis, kind), sizes in groups.items()]


def differences_table(runs: Sequence[Simulated]) -> Numbers:
    """Return the differences from one device by tensor and configuration."""
    names = list(runs[0].differences)
    rows: list[Cells] = [
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
    return Numbers(heads, rows, frozenset(red))


def _difference_cell(found: float) -> str:
    return f"{found:.0e}" if math.isfinite(found) else "differs in shape"


def verdict(results: Sequence[Result]) -> Iterator[str]:
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


def crossing_cells(row: Crossing) -> CrossingCells:
    """Return what the table says of a tensor."""
    forward = [sent_text(entry, row) for entry in row.forward]
    backward = [f"<- {sent_text(entry, row)}" for entry in row.backward]
    return CrossingCells(
        row.name,
        shape_text(row.global_shape),
        shape_text(row.local_shape),
        types_text(row),
        [*forward, *backward],
    )


def types_text(row: Crossing) -> str:
    """Return `dp:S(0) tp:R|P`: the type on each axis, and that of the gradient."""
    return " ".join(f"{axis}:{_cell(row, axis)}" for axis in row.type)


def shape_text(shape: Sequence[int] | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "1"


def worth_showing(crossings: Iterable[Crossing]) -> Iterator[Crossing]:
    """Leave out index tensors inside functions, and rows that are there already."""
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


def sent_text(entry: Entry, row: Crossing) -> str:
    """Name a collective, with its dtype where that is not the dtype of the tensor."""
    text = f"{entry.kind} {entry.axis} {size(entry.nbytes)}"
    return text if entry.dtype == row.dtype else f"{text} {short_dtype(entry.dtype)}"
