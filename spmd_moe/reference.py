"""One-device MoE by a loop over tokens: the oracle. Uses nothing else of this package."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from spmd_moe.config import MoEConfig


def reference_moe(x: Tensor, weights: Mapping[str, Tensor], config: MoEConfig) -> Tensor:
    """(..., D) -> (..., D), token by token, from the global weights by name.

    The names are those of the state dict of a layer on one device.
    """
    rows = x.reshape(-1, config.dim).unbind(0)
    tokens = [_token(t, x_D, weights, config) for t, x_D in enumerate(rows)]
    return torch.stack(tokens).view(x.shape) if tokens else x * 1


def _token(
    token: int, x_D: Tensor, weights: Mapping[str, Tensor], config: MoEConfig
) -> Tensor:
    dtype = torch.promote_types(x_D.dtype, torch.float32)
    logits_E = weights["router.w_gate_ED"].to(dtype) @ x_D.to(dtype)
    softmax = config.score_function == "softmax"
    scores_E = logits_E.softmax(0) if softmax else logits_E.sigmoid()
    bias_E = weights["router.balance.expert_bias_E"]
    if config.round_robin:
        slots = range(token * config.top_k, (token + 1) * config.top_k)
        chosen = [slot % config.num_experts for slot in slots]
    else:
        chosen = _choose(scores_E.detach() + bias_E, config)
    # As in the router, scores so small that they vanish do not divide by zero.
    total = scores_E[chosen].sum() + 1e-20 if config.route_norm else 1.0
    y_D = torch.zeros_like(x_D, dtype=dtype)
    for expert in chosen:
        gate = scores_E[expert] / total * config.route_scale
        matrices = [weights[f"experts.{n}"][expert] for n in ("w1_GFD", "w3_GFD", "w2_GDF")]
        if config.score_before_experts:
            y_D = y_D + _swiglu((gate * x_D.to(dtype)).to(x_D.dtype), *matrices)
        else:
            y_D = y_D + gate * _swiglu(x_D, *matrices).to(dtype)
    y_D = y_D.to(x_D.dtype)
    if config.num_shared_experts:
        names = ("w1_HD", "w3_HD", "w2_DH")
        y_D = y_D + _swiglu(x_D, *(weights[f"shared_experts.{n}"] for n in names))
    return y_D


def _swiglu(x_D: Tensor, w1_FD: Tensor, w3_FD: Tensor, w2_DF: Tensor) -> Tensor:
    return w2_DF @ (silu(w1_FD @ x_D) * (w3_FD @ x_D))


def _choose(scores_E: Tensor, config: MoEConfig) -> list[int]:
    """Choose the best experts of the best groups, by sorting in Python."""
    scores = [float(score) for score in scores_E.detach()]
    size = config.num_experts // (config.num_expert_groups or 1)
    groups = [range(s, s + size) for s in range(0, config.num_experts, size)]
    if config.num_limited_groups is not None:
        groups.sort(key=lambda g: sum(sorted((scores[e] for e in g), reverse=True)[:2]))
        groups = groups[-config.num_limited_groups :]
    allowed = [expert for group in groups for expert in group]
    return sorted(allowed, key=lambda e: scores[e], reverse=True)[: config.top_k]
