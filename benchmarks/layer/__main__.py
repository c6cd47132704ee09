"""`make bench-layer`: the layer beside its peers and beside what the machine allows.

Times are medians of interleaved rounds. With one thread they are the time of that thread,
so that other programs count as little as can be; with more they are by the clock, and want
a machine at rest.
"""

import argparse
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import fast_paths
from benchmarks.layer import between_ranks, growth, one_process
from benchmarks.layer.report import markdown, plot, printed, tables
from benchmarks.layer.shapes import FULL, QUICK

PARTS = "layer", "ranks", "paths", "growth"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--output", type=Path, default=Path("build/bench-layer"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds, budget = (9, 1.0) if options.quick else (31, 8.0)
    console = Console() if Console().is_terminal else Console(width=140)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    run: dict[str, Any] = {}
    run["machine"] = {
        "torch": torch.__version__, "threads": options.threads,
        "python": platform.python_version(),
        "processor": torch.cpu.get_capabilities().get("cpu_name", platform.machine()),
        "load": os.getloadavg()[0],
    }  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("starting", total=None)

        def tell(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                console.print(what)

        quick = options.quick
        measured: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "layer": lambda: one_process.measure(
                QUICK if quick else FULL, rounds, budget, tell
            ),
            "ranks": lambda: between_ranks.measure(
                between_ranks.SHAPES[: 2 if quick else 3], rounds, tell
            ),
            "paths": lambda: fast_paths.measure(
                fast_paths.SHAPES[: 1 if quick else 2], tell
            ),
            "growth": lambda: growth.measure(rounds, budget, tell),
        }
        for part in options.only or measured:
            run[part] = []
            for record in measured[part]():
                run[part].append(record)
                save(run, options.output)
    for title, head, rows in tables(run):
        console.print(printed(title, head, rows))
    for absent in dict.fromkeys(m for r in run.get("layer", []) for m in r["missing"]):
        console.print(f"missing: {absent}")
    if run.get("layer") and not plot(run, options.output / "layer.svg"):
        console.print("missing: matplotlib, so there is no plot")
    console.print(f"written: {options.output}")


def save(run: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run, indent=1))
    (folder / "tables.md").write_text(markdown(run))


if __name__ == "__main__":
    main()
