"""`make bench`: what the checks cost, beside unchecked code and beside `spmd_types`.

Every number is the median of interleaved rounds in this process, and what counts are the
ratios: the machine may be busy. Exit code 1 if a limit is missed.
"""

import sys

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import (
    annotated_call,
    checked_ops,
    compiled_layer,
    erased_layer,
    first_pass,
    new_shapes,
    real_models,
    type_memory,
    verified_step,
)


def main() -> int:
    torch.set_num_threads(1)
    results = [
        *annotated_call.measure(),
        *erased_layer.measure(),
        *checked_ops.measure(),
        *real_models.measure(),
        *new_shapes.measure(),
        *first_pass.measure(),
        *type_memory.measure(),
        *verified_step.measure(),
        *compiled_layer.measure(),
    ]
    table = Table("what", "measured", "limit", "", title="Cost of the checks")
    for result in results:
        table.add_row(
            result.what, result.shown, result.limit, "ok" if result.ok else "MISSED"
        )
    (Console() if sys.stdout.isatty() else Console(width=100)).print(table)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
