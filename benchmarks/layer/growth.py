"""How the layer grows: one size doubles while the others stay."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.layer.contenders import Contender
from benchmarks.layer.one_process import forward, with_backward
from benchmarks.layer.paired import timed
from benchmarks.layer.shapes import GROWTH
from spmd_moe import MoE


def measure(
    rounds: int, budget: float, tell: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """One record for each size."""
    for what, shapes in GROWTH.items():
        tell(f"growth with {what}")
        calls: dict[str, Any] = {}
        for k, shape in enumerate(shapes):
            moe = MoE(shape.config)
            layer = Contender(
                lambda x, moe=moe, t=shape.tokens: moe(x, seq_len=t), list(moe.parameters())
            )
            x_TD = torch.randn(shape.tokens, shape.dim)
            calls[f"forward {k}"] = forward(layer, x_TD)
            calls[f"forward+backward {k}"] = with_backward(layer, x_TD, x_TD)
        # Larger sizes are not hopeless, only larger.
        times = timed(calls, rounds, budget, by_clock=torch.get_num_threads() > 1)
        for k, shape in enumerate(shapes):
            for direction in ("forward", "forward+backward"):
                seconds = times[f"{direction} {k}"].median
                yield {
                    "grows": what, "size": getattr(shape, what), "direction": direction,
                    "shape": asdict(shape), "seconds": seconds,
                }  # fmt: skip
