"""FSDP2 together with expert parallelism.

Tokens are cut over all data ranks, `edp` and `ep`. Experts are cut over `ep` and sharded by
FSDP2 over `edp`. The tokens of all `ep` ranks come to an expert, so its gradient is a sum
over `ep` already; FSDP2 adds the sum over `edp`.
"""

import torch
from torch import Tensor

from placements import R, S

MESH = {"edp": 2, "ep": 2}
TOKENS = 8


def numbers(*shape: int, seed: int) -> Tensor:
    """Draw small whole numbers, whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double()


INPUTS = {
    "x": numbers(TOKENS, 3, seed=0),
    "gates": numbers(TOKENS, 4, seed=1),  # zero where a token does not go
    "w": numbers(4, 3, 2, seed=2),
}
# What each rank holds of every input and result.
CUT = {"edp": S(0), "ep": S(0)}
HELD = {"x": CUT, "gates": CUT, "w": {"edp": R, "ep": S(0)}}
RESULTS = {"w.grad": {"ep": S(0), "edp": S(0)}}  # FSDP2 leaves each rank its shard

# FSDP2 gathers shards by ops of its own, inside of the forward.
REFUSED = "with torch 2.13 it refuses the ops by which FSDP2 gathers shards without types"
UNCHECKED = {"spmd_types local": REFUSED, "spmd_types global": REFUSED}


def losses(gates: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """Return one number for each token."""
    return torch.einsum("te,td,edf->tf", gates, x, w).square().sum(1)


def program(x: Tensor, gates: Tensor, w: Tensor) -> Tensor:
    w = w.detach().requires_grad_()
    losses(gates.detach(), x.detach(), w).mean().backward()
    assert w.grad is not None
    return w.grad
