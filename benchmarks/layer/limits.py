"""What the machine allows: the arithmetic of the rows as dense products, and the weights
read once from memory. A layer cannot be faster than the slower of the two."""

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.layer.shapes import Shape


def fastest(call: Callable[[], object], times: int = 5) -> float:
    """Seconds of the fastest of some calls."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    found: list[float] = []
    for _ in range(times):
        start = clock()
        call()
        found.append(clock() - start)
    return min(found)


def bandwidth() -> float:
    """Bytes a second that are read from memory."""
    block = torch.ones(64 * 2**20)
    return block.nbytes / fastest(block.sum)


def products(shape: Shape, dtype: torch.dtype) -> float:
    """Seconds of the three products of all rows with one matrix each, at their fastest.

    Of the two libraries that torch multiplies with, the faster one. More rows than 2048 are
    counted as multiples of 2048.
    """
    rows = min(shape.rows, 2048)
    x = torch.randn(rows, shape.dim).to(dtype)
    wide = torch.randn(rows, shape.hidden).to(dtype)
    w1 = torch.randn(shape.hidden, shape.dim).to(dtype)
    w2 = torch.randn(shape.dim, shape.hidden).to(dtype)

    def both(a: Tensor, w: Tensor) -> float:
        found = fastest(lambda: linear(a, w))
        if dtype == torch.float32 and torch.backends.mkldnn.is_available():
            handed = a.to_mkldnn()
            found = min(found, fastest(lambda: linear(handed, w)))
        return found

    return (2 * both(x, w1) + both(wide, w2)) * shape.rows / rows


def bytes_of_weights(shape: Shape, dtype: torch.dtype, experts: int) -> int:
    """Bytes of the weights of so many experts."""
    return 3 * experts * shape.dim * shape.hidden * dtype.itemsize
