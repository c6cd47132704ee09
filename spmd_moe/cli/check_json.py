"""The machine-readable report; docs/check.md describes the schema."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from placements.ledger import Entry
from spmd_moe.cli.compare_meshes import Candidate
from spmd_moe.cli.crossings import Crossing
from spmd_moe.cli.simulate import Simulated
from spmd_moe.cli.trace import Memory, Trace, Workload

VERSION = 1  # of the schema; it changes when a key changes its meaning or goes


def report(kind: str, passed: bool, **content: Any) -> dict[str, Any]:
    return {"version": VERSION, "report": kind, "passed": passed, **content}


def of_check(trace: Trace, work: Workload, run: Simulated | None) -> dict[str, Any]:
    """One configuration."""
    return {
        "configuration": trace.configuration,
        "parallel": asdict(trace.parallel),
        "work": of_work(work),
        "crossings": [of_crossing(row) for row in trace.crossings],
        "collectives": of_entries(trace.collectives),
        "gradient_sums": of_entries(trace.gradient_sums),
        "memory": of_memory(trace.memory),
        "simulated": None if run is None else of_run(run),
    }


def of_work(work: Workload) -> dict[str, Any]:
    return {
        "batch": work.batch,
        "seq": work.seq_len,
        "dtype": str(work.dtype).removeprefix("torch."),
    }


def of_crossing(row: Crossing) -> dict[str, Any]:
    gradient = row.gradient_type
    return {
        "name": row.name,
        "where": row.where,
        "role": row.role,
        "dtype": row.dtype,
        "global_shape": row.global_shape,
        "local_shape": row.local_shape,
        "type": {axis: repr(t) for axis, t in row.type.items()},
        "gradient": gradient and {axis: repr(t) for axis, t in gradient.items()},
        "forward": of_entries(row.forward),
        "backward": of_entries(row.backward),
    }


def of_entries(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [
        {
            "collective": entry.kind,
            "axis": entry.axis,
            "bytes": entry.nbytes,
            "backward": entry.backward,
        }
        for entry in entries
    ]


def of_memory(memory: Memory) -> dict[str, int]:
    return {**asdict(memory), "total": memory.total}


def of_candidate(one: Candidate) -> dict[str, Any]:
    return {
        "parallel": asdict(one.parallel),
        "memory": of_memory(one.memory),
        "sent": {
            "forward": one.forward,
            "backward": one.backward,
            "gradient_sums": one.gradient_sums,
        },
    }


def of_run(run: Simulated) -> dict[str, Any]:
    return {
        "passed": run.agrees,
        "model": asdict(run.config),
        "parallel": asdict(run.parallel),
        "work": of_work(run.work),
        "differences": run.differences,
        "collectives": of_entries(run.sent),
        "gradient_sums": of_entries(run.gradient_sums),
    }
