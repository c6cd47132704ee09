"""`make bench-layer`: the layer beside its peers and beside what the machine allows.

Times are medians of interleaved rounds. With one thread they are the time of that thread,
so that other programs count as little as can be; with more they are by the clock, and want
a machine at rest.
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.layer import between_ranks, growth, one_process
from benchmarks.layer.report import markdown, plot, printed, tables
from benchmarks.layer.shapes import FULL, QUICK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, few rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=["layer", "ranks", "growth"], action="append")
    parser.add_argument("--output", type=Path, default=Path("build/bench-layer"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds, budget = (9, 1.0) if options.quick else (31, 8.0)
    parts = options.only or ["layer", "ranks", "growth"]
    console = Console() if Console().is_terminal else Console(width=140)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    run: dict[str, Any] = {"layer": [], "ranks": [], "growth": []}
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

        if "layer" in parts:
            shapes = QUICK if options.quick else FULL
            for record in one_process.measure(shapes, rounds, budget, tell):
                run["layer"].append(record)
                save(run, options.output)
        if "ranks" in parts:
            shapes = between_ranks.SHAPES[: 2 if options.quick else 3]
            run["ranks"] = between_ranks.measure(shapes, rounds, tell)
        if "growth" in parts:
            run["growth"] = growth.measure(rounds, budget, tell)
    save(run, options.output)
    for title, head, rows in tables(run):
        if rows:
            console.print(printed(title, head, rows))
    for missing in {m for record in run["layer"] for m in record["missing"]}:
        console.print(f"missing: {missing}")
    if not plot(run, options.output / "layer.svg"):
        console.print("missing: matplotlib, so there is no plot")
    console.print(f"written: {options.output}")


def save(run: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(run, indent=1))
    (folder / "tables.md").write_text(markdown(run))


if __name__ == "__main__":
    main()
