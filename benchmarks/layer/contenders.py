"""The layers that are compared: the same weights, the same input, the same routing.

A contender is a function of the input that gives the output, and the parameters that get a
gradient. The peers are optional: one that is not installed is named as missing.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from benchmarks.layer.limits import bytes_of_weights
from benchmarks.layer.shapes import Shape
from spmd_moe import MoE

OURS = "ours"
# Of transformers: the ways in which it computes experts on a CPU. The last one copies the
# weights of its expert for each row.
COPIES = "batched_mm"
TRANSFORMERS = ("eager", "grouped_mm", COPIES)
# A contender that needs more memory than this is left out: the system may end the run.
MOST_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Contender:
    """One layer; `run` is a forward. `nbytes` is what it copies of weights in one."""

    run: Callable[[Tensor], Tensor]
    parameters: list[nn.Parameter]
    nbytes: int = 0


def contenders(shape: Shape, dtype: torch.dtype) -> tuple[dict[str, Contender], list[str]]:
    """Every layer of `shape` that can run here, and which ones cannot, with the reason."""
    moe = MoE(shape.config, dtype=dtype)
    parameters = list(moe.parameters())
    found = {
        OURS: Contender(lambda x: moe(x, seq_len=shape.tokens), parameters),
        "textbook loop": Contender(lambda x: textbook(moe, x), parameters),
    }
    peers = {"transformers": of_transformers, "torchtitan": of_torchtitan}
    missing: list[str] = []
    for name, peer in peers.items():
        try:
            found |= peer(shape, moe, dtype)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    # Backward makes the gradient of a copy beside it.
    for name in [n for n, c in found.items() if 2 * c.nbytes > MOST_BYTES]:
        gigabytes = 2 * found.pop(name).nbytes / 2**30
        missing.append(f"{name} on {shape.name}, {dtype}: needs {gigabytes:.1f} GB")
    return found, missing


def textbook(moe: MoE, x_TD: Tensor) -> Tensor:
    """Loop over the experts: gather their tokens, compute, weigh, add to the tokens."""
    top_k, w_gate = moe.config.top_k, moe.router.w_gate_ED
    gates_TK, ids_TK = linear(x_TD.float(), w_gate.float()).softmax(1).topk(top_k, dim=1)
    gates_TK = gates_TK / gates_TK.sum(1, keepdim=True)
    experts = moe.experts
    # Taken apart once: each `w[e]` would make a gradient of all experts.
    weights = zip(*(w.unbind(0) for w in experts.parameters()), strict=True)
    y_TD = torch.zeros_like(x_TD)
    for expert, (w1, w3, w2) in enumerate(weights):
        tokens, choice = torch.where(ids_TK == expert)
        rows = x_TD[tokens]
        out = linear(silu(linear(rows, w1)) * linear(rows, w3), w2)
        out = out * gates_TK[tokens, choice].unsqueeze(1)
        y_TD = y_TD.index_add(0, tokens, out.to(x_TD.dtype))
    return y_TD


def of_transformers(shape: Shape, moe: MoE, dtype: torch.dtype) -> dict[str, Contender]:
    """Qwen3-MoE's block with each of its ways to compute experts; they share weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config: Any = Qwen3MoeConfig(
        hidden_size=shape.dim, moe_intermediate_size=shape.hidden,
        num_experts=shape.experts, num_experts_per_tok=shape.top_k, norm_topk_prob=True,
    )  # fmt: skip
    block: Any = Qwen3MoeSparseMoeBlock(config).to(dtype)
    with torch.no_grad():
        block.gate.weight.copy_(moe.router.w_gate_ED)
        w13 = torch.cat([moe.experts.w1_GFD, moe.experts.w3_GFD], 1)
        block.experts.gate_up_proj.copy_(w13)
        block.experts.down_proj.copy_(moe.experts.w2_GDF)

    def run(way: str) -> Callable[[Tensor], Tensor]:
        def forward(x_TD: Tensor) -> Tensor:
            config._experts_implementation = way
            return block(x_TD.unsqueeze(0)).squeeze(0)

        return forward

    parameters = list(block.parameters())
    copied = shape.rows * bytes_of_weights(shape, dtype, 1)
    return {
        f"transformers {way}": Contender(run(way), parameters, copied * (way == COPIES))
        for way in TRANSFORMERS
    }


def of_torchtitan(shape: Shape, moe: MoE, dtype: torch.dtype) -> dict[str, Contender]:
    """torchtitan's layer on one rank. It computes experts in bfloat16 whatever it gets."""
    if dtype != torch.bfloat16:
        return {}
    from torchtitan.models.common import moe as titan
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    experts, dim, top_k = shape.experts, shape.dim, shape.top_k
    layer: Any = titan.MoE.Config(
        num_experts=experts,
        load_balance_coeff=None,
        router=titan.TokenChoiceTopKRouter.Config(
            num_experts=experts, top_k=top_k, score_func="softmax", route_norm=True,
            gate=Linear.Config(in_features=dim, out_features=experts),
        ),
        routed_experts=titan.RoutedExperts.Config(
            inner_experts=titan.GroupedExperts.Config(
                dim=dim, hidden_dim=shape.hidden, num_experts=experts
            ),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=experts, top_k=top_k),
        ),
    ).build()  # fmt: skip
    layer = layer.to(dtype)
    theirs, ours = layer.routed_experts.inner_experts, moe.experts
    with torch.no_grad():
        layer.router.gate.weight.copy_(moe.router.w_gate_ED)
        theirs.w1_EFD.copy_(ours.w1_GFD)
        theirs.w3_EFD.copy_(ours.w3_GFD)
        theirs.w2_EDF.copy_(ours.w2_GDF)

    def run(x_TD: Tensor) -> Tensor:
        with warnings.catch_warnings():  # it asks for autocast to float32, for GPUs
            warnings.simplefilter("ignore", UserWarning)
            return layer(x_TD.unsqueeze(0)).squeeze(0)

    return {"torchtitan": Contender(run, list(layer.parameters()))}
