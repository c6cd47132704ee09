"""Step 1: a plain loop on one device, with a layer of this package in it."""

import torch
from torch import Tensor, nn

from spmd_moe import MoE, MoEConfig

CONFIG = MoEConfig(dim=16, hidden_dim=16, num_experts=4, top_k=2, num_shared_experts=1)
BATCH, SEQ_LEN, STEPS = 4, 7, 3


class Model(nn.Module):
    """x + moe(norm(x)), then a projection."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        dim = moe.config.dim
        self.norm_D = nn.Parameter(torch.ones(dim))
        self.out_DD = nn.Parameter(torch.randn(dim, dim, generator=generator) / dim**0.5)
        self.moe = moe

    def forward(self, x_BLD: Tensor) -> Tensor:
        normed_BLD = nn.functional.rms_norm(x_BLD, self.norm_D.shape, self.norm_D)
        x_BLD = x_BLD + self.moe(normed_BLD, seq_len=SEQ_LEN)
        return nn.functional.linear(x_BLD, self.out_DD)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: input and target."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (BATCH, SEQ_LEN, CONFIG.dim)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def train() -> list[float]:
    model = Model(MoE(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x_BLD, target_BLD = batch(step)
        loss = (model(x_BLD) - target_BLD).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print("losses on one device:", *(f"{loss:.6f}" for loss in train()))
