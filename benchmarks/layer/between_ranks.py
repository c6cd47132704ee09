"""Dispatch, experts and combine between gloo processes, beside a textbook layer.

The textbook layer is written with torch's own collectives that have a backward. Both have
the same weights and the same routing, and compute their experts in the same way, so what
differs is how the rows travel.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import linear

from benchmarks.layer.paired import Times, ratio, timed
from benchmarks.layer.shapes import Shape
from placements import ledger, set_current_mesh
from placements.testing import run_ranks
from spmd_moe import MoE, Parallel

SHAPES = (
    Shape("decode", 16, 512, 256, 16, 2),
    Shape("small", 128, 512, 256, 16, 2),
    Shape("many rows", 1024, 512, 256, 16, 2),
)


def textbook(moe: MoE, x_TD: Tensor, ranks: int) -> Tensor:
    """Route, sort, exchange counts, exchange rows, sort again, compute, and all back."""
    from torch.distributed.nn.functional import all_to_all_single

    config = moe.config
    scores_TE = linear(x_TD, moe.router.w_gate_ED).softmax(1)
    gates_TK, ids_TK = scores_TE.topk(config.top_k, dim=1)
    gates_TK = gates_TK / gates_TK.sum(1, keepdim=True)
    order_N = ids_TK.flatten().argsort(stable=True)
    counts_E = torch.bincount(ids_TK.flatten(), minlength=config.num_experts)
    received_E = torch.empty_like(counts_E)
    dist.all_to_all_single(received_E, counts_E)
    sent = counts_E.view(ranks, -1).sum(1).tolist()
    received_WG = received_E.view(ranks, -1)
    received = received_WG.sum(1).tolist()
    rows_ND = x_TD[order_N // config.top_k]
    rows_MD: Any = all_to_all_single(
        rows_ND.new_empty(sum(received), x_TD.shape[1]), rows_ND, received, sent
    )
    local = received_WG.shape[1]
    expert_M = torch.arange(local).repeat(ranks).repeat_interleave(received_E)
    regroup_M = expert_M.argsort(stable=True)
    computed_MD = moe.experts(rows_MD[regroup_M], received_WG.sum(0))
    back_MD = computed_MD[regroup_M.argsort()]
    back_ND: Any = all_to_all_single(torch.empty_like(rows_ND), back_MD, sent, received)
    rows_TKD = back_ND[order_N.argsort()].view(*ids_TK.shape, -1)
    return (gates_TK.unsqueeze(1) @ rows_TKD).squeeze(1)


def on_rank(ranks: int, shape: Shape, rounds: int) -> dict[str, Any]:
    """Times of one rank, and what it handed to collectives."""
    torch.set_num_threads(1)
    parallel = Parallel(dp=ranks, ep=ranks)
    sizes = parallel.dense_mesh()
    names = tuple(sizes)
    dense = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=names)
    with set_current_mesh(dense):
        return measured(ranks, parallel, shape, rounds)


def measured(ranks: int, parallel: Parallel, shape: Shape, rounds: int) -> dict[str, Any]:
    """Measure on this rank, with its mesh current."""
    torch.manual_seed(dist.get_rank())
    moe = MoE(shape.config, parallel)
    x_TD = torch.randn(shape.tokens, shape.dim)

    def ours(x: Tensor) -> Tensor:
        return moe(x, seq_len=shape.tokens)

    def by_book(x: Tensor) -> Tensor:
        return textbook(moe, x, ranks)

    torch.testing.assert_close(ours(x_TD), by_book(x_TD), rtol=1e-4, atol=1e-4)
    with ledger() as sent:
        ours(x_TD.clone().requires_grad_()).sum().backward()
    found: dict[str, Any] = {"bytes": sent.nbytes()}
    for direction in ("forward", "forward+backward"):
        found[direction] = {}
        for name, layer in {"ours": ours, "textbook": by_book}.items():

            def call(layer: Any = layer, back: bool = "+" in direction) -> None:
                with torch.set_grad_enabled(back):
                    y_TD = layer(x_TD.clone().requires_grad_(back))
                if back:
                    y_TD.sum().backward()
                moe.zero_grad()
                dist.barrier()

            found[direction][name] = call
        # every rank must take as many rounds: there is no budget of time
        times = wall(found[direction], rounds)
        found[direction] = {n: t.seconds for n, t in times.items()}
    return found


def wall(calls: dict[str, Any], rounds: int) -> dict[str, Times]:
    """Time by the clock, since a rank also waits for the others."""
    return timed(calls, rounds, float("inf"), by_clock=True)


def measure(
    shapes: tuple[Shape, ...], rounds: int, tell: Callable[[str], object]
) -> Iterator[dict[str, Any]]:
    """One record for each number of ranks, shape and direction."""
    for ranks in (2, 4):
        for shape in shapes:
            tell(f"{ranks} ranks, {shape.name}")
            results = run_ranks(ranks, on_rank, ranks, shape, rounds, backend="gloo")
            for direction in ("forward", "forward+backward"):
                ours, book = (Times(results[0][direction][n]) for n in ("ours", "textbook"))
                yield {
                    "ranks": ranks, "shape": asdict(shape), "direction": direction,
                    "seconds": {"ours": ours.median, "textbook": book.median},
                    "ratio": asdict(ratio(ours, book)),
                    "bytes": [r["bytes"] for r in results],
                }  # fmt: skip
