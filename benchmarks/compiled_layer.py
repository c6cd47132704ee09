"""The layer compiles as one graph. Printed: time to compile, and speed over eager."""

import time

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from benchmarks.timing import Candidate, Result, medians
from placements import set_current_mesh
from spmd_moe import MoE, MoEConfig

CONFIG = MoEConfig(dim=128, hidden_dim=64, num_experts=8, top_k=2, num_shared_experts=1)
TOKENS = 512


def measure() -> list[Result]:
    moe = MoE(CONFIG)
    x_TD = torch.randn(TOKENS, CONFIG.dim, requires_grad=True)

    def step(layer: torch.nn.Module) -> Tensor:
        y_TD = layer(x_TD, seq_len=TOKENS)
        y_TD.sum().backward()
        return y_TD

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(moe)  # not as one graph by force: breaks are counted
    with set_current_mesh({}):
        start = time.perf_counter()
        step(compiled)
        seconds = time.perf_counter() - start
        times = medians(
            {"eager": Candidate(lambda: step(moe)), "c": Candidate(lambda: step(compiled))},
            calls=2,
            rounds=5,
        )
    graphs = counters["stats"]["unique_graphs"]
    breaks = sum(counters["graph_break"].values())
    ratio = times["c"] / times["eager"]
    return [
        Result("graphs of the compiled layer", f"{graphs}", "1", graphs == 1),
        Result("breaks of its graph", f"{breaks}", "0", breaks == 0),
        Result("its first step, compiled by inductor", f"{seconds:.0f} s", "", True),
        Result("a compiled step over an eager one", f"{ratio:.2f}", "", True),
    ]
