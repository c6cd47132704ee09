"""The recipe of a training: sizes, seed, learning rate; nothing about ranks.

Two runs of one recipe have the same losses on every mesh, so a checkpoint belongs to a
recipe, and can be continued on other ranks but not with another recipe.
"""

from dataclasses import dataclass, fields

import torch

from spmd_moe.config import MoEConfig, Parallel, check_together

# Of the parameters, their gradients and AdamW's moments. A step in bfloat16 computes in it
# by autocast: weights that were kept in it would not change by a small step.
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.float32,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and seed, validated on construction; ValueError names the field."""

    layers: int = 2
    dim: int = 32
    heads: int = 4
    hidden_dim: int = 32
    num_experts: int = 8
    top_k: int = 2
    num_shared_experts: int = 1
    seq_len: int = 32
    batch: int = 8
    lr: float = 3e-3
    seed: int = 0
    dtype: str = "float64"

    def __post_init__(self) -> None:
        for field in ("layers", "dim", "heads", "seq_len", "batch"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} ({getattr(self, field)}) must be a whole number of at least 1"
                )
        if self.dim % self.heads:
            raise ValueError(f"dim ({self.dim}) must be divisible by heads ({self.heads})")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"lr ({self.lr}) must be a number above 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype ({self.dtype!r}) must be one of {', '.join(DTYPES)}")
        self.moe_config()

    def moe_config(self) -> MoEConfig:
        return MoEConfig(
            dim=self.dim,
            hidden_dim=self.hidden_dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_shared_experts=self.num_shared_experts,
            route_norm=True,
            load_balance_coeff=1e-3,
        )

    def check_fits(self, parallel: Parallel) -> None:
        """Raise ValueError unless the model can be cut over these ranks."""
        check_together(self.moe_config(), parallel)
        for what, size, axis in (("heads", self.heads, "tp"), ("batch", self.batch, "dp")):
            degree = getattr(parallel, axis)
            if size % degree:
                raise ValueError(f"{what} ({size}) must be divisible by {axis} ({degree})")


FIELDS = tuple(field.name for field in fields(Recipe))
