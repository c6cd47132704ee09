"""A verified step of an MLP on 4 gloo processes costs at most twice a plain one."""

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


def measure() -> list[Result]:
    found = run_ranks(AXES, times, 41, backend="gloo", timeout=120.0)[0]
    ratio = found["verified"] / found["plain"]
    shown = f"{ratio:.2f} ({found['plain'] * 1e3:.1f} ms plain)"
    what = f"verified step over a plain one, 4 gloo ranks, MLP T{T} D{D} F{F}"
    return [Result(what, shown, f"<= {LIMIT}", ratio <= LIMIT)]
