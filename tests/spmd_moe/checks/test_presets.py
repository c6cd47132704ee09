"""The presets have the sizes that were published, and so the published totals."""

from dataclasses import asdict
from typing import NamedTuple

import pytest
import torch

from spmd_moe import Parallel
from spmd_moe.checks.presets import PRESETS
from spmd_moe.checks.trace import Workload, trace


class Published(NamedTuple):
    """Fields of the model's config.json; MoE layers; parameters of the whole model."""

    hidden_size: int
    moe_intermediate_size: int
    experts: int
    experts_per_token: int
    shared_experts: int
    scoring: str
    norm_top_k: bool
    scaling: float
    groups: int | None
    groups_of_a_token: int | None
    layers: int
    billions: float


# mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B, deepseek-ai/DeepSeek-V3 (3 of its 61
# layers are dense).
PUBLISHED = {
    "mixtral-8x7b": Published(
        4096, 14336, 8, 2, 0, "softmax", True, 1.0, None, None, 32, 46.7
    ),
    "qwen3-moe": Published(
        2048, 768, 128, 8, 0, "softmax", True, 1.0, None, None, 48, 30.5
    ),
    "deepseek-v3": Published(
        7168, 2048, 256, 8, 1, "sigmoid", True, 2.5, 8, 4, 58, 671
    ),
}  # fmt: skip


def test_all_models_are_compared() -> None:
    assert set(PUBLISHED) == set(PRESETS) - {"tiny"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    config, said = PRESETS[name].config, PUBLISHED[name]
    fields = asdict(config)
    order = (
        "dim", "hidden_dim", "num_experts", "top_k", "num_shared_experts",
        "score_function", "route_norm", "route_scale", "num_expert_groups",
        "num_limited_groups",
    )  # fmt: skip
    assert tuple(fields[field] for field in order) == said[:10]
    found = trace(config, Parallel(), Workload(1, 64, torch.bfloat16))
    parameters = said.layers * found.memory.parameters / 2
    # the rest is attention, embeddings and dense layers
    assert 0.94 < parameters / (said.billions * 1e9) < 0.99
