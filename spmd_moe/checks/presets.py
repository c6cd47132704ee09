"""Table: models by name, as published, and the mesh on which each is looked at first."""

from dataclasses import dataclass

from spmd_moe.checks.errors import BadInput
from spmd_moe.config import MoEConfig


@dataclass(frozen=True)
class Preset:
    """One MoE layer of a model; `batch` sequences of `seq` tokens on every dp rank."""

    about: str
    config: MoEConfig
    mesh: str
    batch: int = 1
    seq: int = 4096
    dtype: str = "bfloat16"


PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        "small enough to run; 5 tokens do not divide by 2 ranks",
        MoEConfig(
            dim=16, hidden_dim=32, num_experts=8, top_k=2, num_shared_experts=1,
            route_norm=True,
        ),
        mesh="dp=2,tp=2,ep=2", batch=2, seq=5, dtype="float32",
    ),
    "mixtral-8x7b": Preset(
        "Mixtral 8x7B: few wide experts",
        MoEConfig(
            dim=4096, hidden_dim=14336, num_experts=8, top_k=2,
            score_function="softmax", route_norm=True,
        ),
        mesh="dp=8,tp=8,ep=8",
    ),
    "qwen3-moe": Preset(
        "Qwen3-30B-A3B: many narrow experts",
        MoEConfig(
            dim=2048, hidden_dim=768, num_experts=128, top_k=8,
            score_function="softmax", route_norm=True,
        ),
        mesh="dp=16,tp=4,ep=32",
    ),
    "deepseek-v3": Preset(
        "DeepSeek-V3: node-limited routing, a shared expert; 8192 ranks",
        MoEConfig(
            dim=7168, hidden_dim=2048, num_experts=256, top_k=8, num_shared_experts=1,
            score_function="sigmoid", route_norm=True, route_scale=2.5,
            num_expert_groups=8, num_limited_groups=4,
        ),
        mesh="dp=1024,tp=8,ep=64",
    ),
}  # fmt: skip


def preset_of(name: str) -> Preset:
    if name not in PRESETS:
        raise BadInput(f"--preset {name}: no such preset; give one of {', '.join(PRESETS)}")
    return PRESETS[name]
