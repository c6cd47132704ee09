"""What a verified step costs, beside a plain one.

An MLP on 4 gloo processes: at most twice as much. The MoE layer on up to 64 simulated
ranks: at most three times as much, however many ranks there are.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from benchmarks.timing import Result
from placements import (
    I,
    On,
    P,
    R,
    S,
    all_reduce,
    assert_type,
    convert,
    declare,
    reduce_gradients,
    set_current_mesh,
    typed,
    verify,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, MoEConfig, Parallel

LIMIT = 2.0
T, D, F = 256, 256, 1024
AXES = {"dp": 2, "tp": 2}

Tokens = Annotated[Tensor, On(dp=S(0), tp=I)]


class Mlp(nn.Module):
    def __init__(self, tp: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w_in_FD = nn.Parameter(torch.randn(F // tp, D, generator=generator) / 50)
        self.w_out_DF = nn.Parameter(torch.randn(D, F // tp, generator=generator) / 50)
        types = {"w_in_FD": {"dp": R, "tp": S(0)}, "w_out_DF": {"dp": R, "tp": S(1)}}
        declare(self, types)

    @typed
    def forward(self, x_TD: Tokens) -> Tokens:
        x_TD = convert(x_TD, "tp", src=I, dst=R)
        h_TF = gelu(linear(x_TD, self.w_in_FD))
        return all_reduce(linear(h_TF, self.w_out_DF), "tp", src=P, dst=I)


def step(mlp: Mlp, x_TD: Tensor) -> None:
    y_TD = mlp(assert_type(x_TD, {"dp": S(0), "tp": I}))
    torch.autograd.backward(all_reduce((y_TD**2).sum(), "dp", src=P, dst=I))
    reduce_gradients(mlp)


def times(rounds: int) -> dict[str, float]:
    """Median seconds of a step on this rank, plain and verified in turn."""
    torch.set_num_threads(1)
    ways: dict[str, Callable[[], AbstractContextManager[Any]]]
    ways = {"plain": nullcontext, "verified": verify}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    with set_current_mesh(device_mesh()):
        mlp = Mlp(AXES["tp"])
        generator = torch.Generator().manual_seed(dist.get_rank() // AXES["tp"])
        x_TD = torch.randn(T, D, generator=generator).requires_grad_()
        for _ in range(rounds):
            for way, context in ways.items():
                dist.barrier()
                start = time.perf_counter()
                with context():
                    step(mlp, x_TD)
                dist.barrier()
                seconds[way].append(time.perf_counter() - start)
                mlp.zero_grad()
                x_TD.grad = None
    return {way: statistics.median(of_way) for way, of_way in seconds.items()}


MOE_LIMIT = 3.0
MOE = MoEConfig(dim=64, hidden_dim=128, num_experts=64, top_k=2, num_shared_experts=1)
SEQ_LEN, BATCH = 64, 4  # on each rank of dp
RANKS = (8, 16, 32, 64)


def moe_seconds(parallel: Parallel, rounds: int) -> dict[str, float]:
    """Return the least seconds of a step, plain and verified in turn.

    The ranks are threads of this process, and the seconds are its own: what else the
    machine does is not counted.
    """
    seconds: dict[str, list[float]] = {"plain": [], "verified": []}
    mesh = device_mesh()
    with set_current_mesh(mesh):
        moe = MoE(MOE, parallel)
        generator = torch.Generator().manual_seed(dist.get_rank())
        shape = (BATCH, SEQ_LEN // parallel.tp, MOE.dim)
        for _ in range(rounds):
            for way, context in {"plain": nullcontext, "verified": verify}.items():
                x_BLD = torch.randn(shape, generator=generator)
                dist.barrier()
                start = time.process_time()
                with context():
                    assert_type(x_BLD, moe.layout.input)
                    y_BLD = moe(x_BLD, seq_len=SEQ_LEN)
                    torch.autograd.backward((y_BLD**2).sum())
                    reduce_gradients(moe, meshes=(mesh, moe.dispatcher.mesh))
                dist.barrier()
                seconds[way].append(time.process_time() - start)
                moe.zero_grad()
    return {way: min(of_way) for way, of_way in seconds.items()}


def measure_ranks(ranks: int) -> Result:
    dp = ranks // 2
    parallel = Parallel(dp=dp, tp=2, ep=dp, sequence_parallel=True)
    axes = parallel.dense_mesh()
    found = run_ranks(axes, moe_seconds, parallel, 3, timeout=600.0)[0]
    ratio = found["verified"] / found["plain"]
    shown = f"{ratio:.2f} ({found['plain']:.2f} s plain)"
    what = f"verified step over a plain one, {ranks} simulated ranks, MoE layer"
    return Result(what, shown, f"<= {MOE_LIMIT}", ratio <= MOE_LIMIT)


def measure() -> list[Result]:
    found = run_ranks(AXES, times, 41, backend="gloo", timeout=120.0)[0]
    ratio = found["verified"] / found["plain"]
    shown = f"{ratio:.2f} ({found['plain'] * 1e3:.1f} ms plain)"
    what = f"verified step over a plain one, 4 gloo ranks, MLP T{T} D{D} F{F}"
    gloo = Result(what, shown, f"<= {LIMIT}", ratio <= LIMIT)
    return [gloo, *map(measure_ranks, RANKS)]
