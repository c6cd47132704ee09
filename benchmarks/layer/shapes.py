"""The layers that are measured, from decoding to training."""

from dataclasses import dataclass

from spmd_moe import MoEConfig


@dataclass(frozen=True)
class Shape:
    """Tokens, and the sizes of a layer."""

    name: str
    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def config(self) -> MoEConfig:
        """Return what Qwen3-MoE computes: softmax, and gates that sum to one."""
        return MoEConfig(
            dim=self.dim, hidden_dim=self.hidden, num_experts=self.experts,
            top_k=self.top_k, score_function="softmax", route_norm=True,
        )  # fmt: skip


FULL = (
    Shape("decode, 64 experts", 16, 1024, 512, 64, 6),
    Shape("decode, 16 experts", 16, 512, 1024, 16, 2),
    Shape("small, 16 experts", 256, 512, 1024, 16, 2),
    Shape("small, 64 experts", 256, 1024, 512, 64, 6),
    Shape("many rows, 16 experts", 2048, 512, 1024, 16, 2),
    Shape("many rows, 64 experts", 4096, 1024, 512, 64, 6),
)
QUICK = (
    Shape("decode, 16 experts", 16, 256, 256, 16, 2),
    Shape("small, 16 experts", 256, 256, 256, 16, 2),
    Shape("many rows, 8 experts", 1024, 256, 512, 8, 2),
)
# One size doubles while the others stay.
GROWTH = {
    "tokens": [Shape("", t, 512, 512, 16, 2) for t in (64, 128, 256, 512, 1024)],
    "experts": [Shape("", 512, 512, 512, e, 2) for e in (4, 8, 16, 32, 64)],
}
