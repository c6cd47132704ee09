"""The layer in one process: every contender on every shape, forward and with backward."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.layer.contenders import OURS, Contender, contenders
from benchmarks.layer.limits import bandwidth, bytes_of_weights, products
from benchmarks.layer.memory import peak_bytes
from benchmarks.layer.paired import ratio, timed
from benchmarks.layer.shapes import Shape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# How much a layer may differ from ours in its outputs, as a share of the largest.
TOLERANCES = {"float32": 1e-4, "bfloat16": 5e-2}


def forward(contender: Contender, x_TD: Tensor) -> Callable[[], object]:
    def call() -> None:
        with torch.no_grad():
            contender.run(x_TD)

    return call


def with_backward(
    contender: Contender, x_TD: Tensor, dy_TD: Tensor
) -> Callable[[], object]:
    x_TD = x_TD.clone().requires_grad_()

    def call() -> None:
        for leaf in (x_TD, *contender.parameters):
            leaf.grad = None
        contender.run(x_TD).backward(dy_TD)
        for leaf in (x_TD, *contender.parameters):
            leaf.grad = None

    return call


def measure(
    shapes: tuple[Shape, ...], rounds: int, budget: float, tell: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """One record for each shape, dtype and direction."""
    read = bandwidth()
    for shape in shapes:
        for name, dtype in DTYPES.items():
            tell(f"{shape.name}, {name}")
            torch.manual_seed(0)
            x_TD = torch.randn(shape.tokens, shape.dim).to(dtype)
            dy_TD = torch.randn(shape.tokens, shape.dim).to(dtype)
            layers, missing = contenders(shape, dtype)
            compare_outputs(layers, x_TD, TOLERANCES[name])
            hit = len(chosen(shape, x_TD))
            floor = {
                "products": products(shape, dtype),
                "bytes": bytes_of_weights(shape, dtype, hit) / read,
            }
            for direction in ("forward", "forward+backward"):
                calls = {
                    n: forward(c, x_TD)
                    if direction == "forward"
                    else with_backward(c, x_TD, dy_TD)
                    for n, c in layers.items()
                }
                times = timed(calls, rounds, budget)
                peaks = {
                    n: peak_bytes(call)
                    for n, call in calls.items()
                    if len(times[n].seconds) > 1
                }
                # Backward has twice the products, reads the weights and writes gradients.
                scale = 1 if direction == "forward" else 3
                peers = {n: t for n, t in times.items() if n != OURS and len(t.seconds) > 1}
                best = min(peers, key=lambda n: peers[n].median)
                yield {
                    "shape": asdict(shape), "dtype": name, "direction": direction,
                    "seconds": {n: t.median for n, t in times.items()},
                    "spread": {n: t.spread for n, t in times.items()},
                    "rounds": len(times[OURS].seconds),
                    "peak_bytes": peaks, "best_peer": best,
                    "ratio": asdict(ratio(times[OURS], times[best])),
                    "limits": {n: s * scale for n, s in floor.items()},
                    "missing": missing,
                }  # fmt: skip


def chosen(shape: Shape, x_TD: Tensor) -> set[int]:
    """Experts that get rows."""
    from spmd_moe import MoE

    moe = MoE(shape.config, dtype=x_TD.dtype)
    return set(moe.router(x_TD).expert_ids_TK.flatten().tolist())


def compare_outputs(layers: dict[str, Contender], x_TD: Tensor, tolerance: float) -> None:
    """Raise unless all layers compute the same for nearly all tokens.

    In half precision the peers score in half precision, so a token whose experts score
    alike may go to another expert there.
    """
    with torch.no_grad():
        found = {name: layer.run(x_TD).float() for name, layer in layers.items()}
    ours = found[OURS]
    for name, y_TD in found.items():
        wrong = (y_TD - ours).abs().amax(1) > tolerance * ours.abs().max()
        share = wrong.float().mean().item()
        if share > (0.0 if x_TD.dtype == torch.float32 else 0.2):
            raise AssertionError(f"{name} differs from ours on {share:.1%} of the tokens")
