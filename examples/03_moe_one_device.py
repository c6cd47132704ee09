"""Train an MoE layer in one process, and compare it with a loop over tokens."""

import torch

from placements import set_current_mesh, typecheck
from spmd_moe import MoE, MoEConfig, reference_moe, update_expert_bias

config = MoEConfig(
    dim=32,
    hidden_dim=64,
    num_experts=8,
    top_k=2,
    num_shared_experts=1,
    score_function="sigmoid",
    route_norm=True,
    load_balance_coeff=1e-2,
)
torch.manual_seed(0)
moe = MoE(config)
x_BLD = torch.randn(4, 16, 32) + 0.5  # a common part, so that some experts are favoured
target_BLD = torch.randn(4, 16, 32)

y_BLD = moe(x_BLD, seq_len=16)
error = (y_BLD - reference_moe(x_BLD, moe.state_dict(), config)).abs().max().item()
print(f"largest difference to the loop over tokens: {error:.0e}")
assert error < 1e-5

optimizer = torch.optim.AdamW(moe.parameters(), lr=3e-3)
moe.router.balance.counts_E.zero_()
for step in range(30):
    optimizer.zero_grad()
    with set_current_mesh({}), typecheck():  # one device: shapes are checked, no more
        loss = (moe(x_BLD, seq_len=16) - target_BLD).square().mean()
    loss.backward()
    optimizer.step()
    counts = moe.router.balance.counts_E.tolist()
    update_expert_bias(moe)
    if step % 10 == 0 or step == 29:
        print(f"step {step:2}  loss {loss.item():.3f}  tokens per expert {counts}")
