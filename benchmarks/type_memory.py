"""Types keep nothing alive, and a loop of checked ops does not grow."""

import gc
import tracemalloc
import weakref

import torch

from benchmarks.timing import Result
from placements import R, S, assert_type, set_current_mesh, typecheck

NUM_OPS = 10_000
LIMIT_BYTES = 64_000  # allocator noise; ten thousand types alone would be 2 MB


def measure() -> list[Result]:
    with set_current_mesh({"dp": 2, "tp": 4}), typecheck():
        x = assert_type(torch.randn(4, 8), {"dp": S(0), "tp": R})
        _loop(x, 200)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        _loop(x, NUM_OPS)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        alive = weakref.ref(x)
        del x
        gone = alive() is None
    limit = f"<= {LIMIT_BYTES} B"
    return [
        Result(f"{NUM_OPS} checked ops grow by", f"{grown} B", limit, grown <= LIMIT_BYTES),
        Result("a typed tensor is freed with its last name", str(gone), "True", gone),
    ]


def _loop(x: torch.Tensor, num_ops: int) -> None:
    for step in range(num_ops // 2):
        # other shapes and numbers each time, so that the memo is exercised too
        ((x[:, : step % 8] if step % 2 else x) * float(step)).sum()
