"""The layer compiles as one graph. Printed: time to compile, and speed over eager.

On one device, and on two processes with the experts on both. Every time is processor time:
most of compiling is done by a C++ compiler, which a busy machine keeps waiting for minutes.
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
import torch._dynamo
import torch._inductor.utils
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.timing import Result
from placements import Mesh, as_mesh, set_current_mesh
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, MoEConfig, Parallel

CONFIG = MoEConfig(dim=128, hidden_dim=64, num_experts=8, top_k=2, num_shared_experts=1)
TOKENS = 512  # of each rank
ROUNDS = 15
WHERE = {"on one device": Parallel(), "on 2 ranks with EP": Parallel(dp=2, ep=2)}
TIMEOUT = 1800.0  # seconds; compiling waits for its turn


class Times(NamedTuple):
    """Seconds of a forward and of its backward."""

    forward: float
    backward: float

    def __str__(self) -> str:
        return f"{self.forward:.0f} + {self.backward:.0f} s"


class Found(NamedTuple):
    graphs: int
    breaks: int
    compiling: Times
    compiled: Times
    eager: Times


def measure() -> list[Result]:
    return [line for where in WHERE for line in _lines(where)]


def _lines(where: str) -> list[Result]:
    parallel = WHERE[where]
    if parallel.num_ranks == 1:
        found = _measured(parallel)
    else:
        ranks = run_ranks(
            parallel.num_ranks, _measured, parallel, backend="gloo", timeout=TIMEOUT
        )
        found = ranks[0]
    forward, backward = (
        new / old for new, old in zip(found.compiled, found.eager, strict=True)
    )
    return [
        Result(f"graphs of the layer {where}", f"{found.graphs}", "1", found.graphs == 1),
        Result("breaks of its graph", f"{found.breaks}", "0", found.breaks == 0),
        Result("inductor compiles forward + backward in", f"{found.compiling}", "", True),
        Result("compiled forward over eager", f"{forward:.2f}", "", True),
        Result("compiled backward over eager", f"{backward:.2f}", "", True),
    ]


def _measured(parallel: Parallel) -> Found:
    dense, sparse = _meshes(parallel)
    with set_current_mesh(dense):
        moe = MoE(CONFIG, parallel, sparse_mesh=sparse)
    x_TD = torch.randn(TOKENS, CONFIG.dim, requires_grad=True)
    torch._dynamo.reset()
    counters.clear()
    # As `fullgraph=True` compiles, which traces sizes that are read from tensors, but a
    # break is counted here, and is no error.
    compiled = cast(Any, torch).compile(moe)
    sizes = cast(Any, torch)._dynamo.config.patch(capture_scalar_outputs=True)
    # Every rank compiles; what another one, or a run before, has made would hide that.
    fresh = cast(AbstractContextManager[Any], torch._inductor.utils.fresh_cache())
    with set_current_mesh(dense), sizes, fresh:
        compiling = _step(compiled, x_TD, _with_children)
        layers = {"compiled": compiled, "eager": moe}
        times: dict[str, list[Times]] = {name: [] for name in layers}
        for _ in range(ROUNDS):
            for name, layer in layers.items():
                times[name].append(_step(layer, x_TD, time.thread_time))
    graphs = counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    compiled_times, eager_times = (
        Times(*map(statistics.median, zip(*times[name], strict=True))) for name in layers
    )
    return Found(graphs, breaks, compiling, compiled_times, eager_times)


def _meshes(parallel: Parallel) -> tuple[Mesh, Mesh]:
    sizes = parallel.dense_mesh(), parallel.sparse_mesh()
    if not dist.is_initialized():
        return Mesh(sizes[0]), Mesh(sizes[1])
    dense, sparse = (as_mesh(device_mesh(one)) for one in sizes)
    return dense, sparse


def _with_children() -> float:
    """Return the processor time of this process, and of what it ran."""
    return sum(os.times()[:4])


def _step(layer: Any, x_TD: Tensor, clock: Callable[[], float]) -> Times:
    start = clock()
    y_TD = layer(x_TD, seq_len=TOKENS)
    middle = clock()
    y_TD.sum().backward()
    return Times(middle - start, clock() - middle)
