"""Print the report for programs; docs/check.md describes the schema."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from placements.runtime.ledger import Entry
from spmd_moe.checks.configurations import Result
from spmd_moe.checks.crossings import Crossing
from spmd_moe.checks.meshes import Candidate
from spmd_moe.checks.simulate import Simulated
from spmd_moe.checks.trace import Memory, Workload

VERSION = 1  # of the schema; it changes when a key changes its meaning or goes


def print_report(
    kind: str, passed: bool, *, failure: str | None = None, **content: Any
) -> None:
    """Print the one object of `--json`; `failure` is what ended the check, if anything."""
    report = {"version": VERSION, "report": kind, "passed": passed, "failure": failure}
    print(json.dumps({**report, **content}, indent=2))


def of_check(result: Result, work: Workload) -> dict[str, Any]:
    """Describe one configuration."""
    trace = result.trace
    return {
        "configuration": trace.configuration,
        "parallel": asdict(trace.parallel),
        "work": of_work(work),
        "crossings": [of_crossing(row) for row in trace.crossings],
        "collectives": of_entries(trace.collectives),
        "gradient_sums": of_entries(trace.gradient_sums),
        "memory": of_memory(trace.memory),
        "simulated": None if result.run is None else _of_run(result, result.run),
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
        "sources": row.sources,
    }


def of_entries(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [
        {
            "collective": entry.kind,
            "axis": entry.axis,
            "bytes": entry.nbytes,
            "dtype": entry.dtype,
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


def _of_run(result: Result, run: Simulated) -> dict[str, Any]:
    return {
        "passed": result.passed,
        "model": asdict(run.config),
        "parallel": asdict(run.parallel),
        "work": of_work(run.work),
        "differences": run.differences,
        "rows": run.rows,
        "sent_otherwise": list(result.sent_otherwise),
        "collectives": of_entries(run.sent),
        "gradient_sums": of_entries(run.gradient_sums),
    }
