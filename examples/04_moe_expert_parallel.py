"""The same layer on 4 ranks: experts over ep, sequence over tp, every tensor checked.

Here the ranks are simulated in one process. On real ones (`torchrun`) the body of `train`
is the same, with `init_device_mesh` in place of `device_mesh`.
"""

import torch
import torch.distributed as dist

from placements import (
    assert_type,
    clip_grad_norm_,
    ledger,
    reduce_gradients,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, MoEConfig, Parallel

config = MoEConfig(
    dim=16, hidden_dim=32, num_experts=8, top_k=2, num_shared_experts=1, route_norm=True
)
parallel = Parallel(dp=2, tp=2, ep=4, sequence_parallel=True)
SEQ_LEN = 7  # over tp=2 one rank holds 4 positions and the other 3: no padding exists
torch.manual_seed(0)
x_BLD = torch.randn(4, SEQ_LEN, 16)


def train(steps: int) -> tuple[list[float], list[str], torch.Tensor]:
    """Losses, the collectives of a step, and the gate weight at the end."""
    dense = device_mesh(parallel.dense_mesh())
    sparse = device_mesh(parallel.sparse_mesh())
    losses: list[float] = []
    with set_current_mesh(dense):
        moe = MoE(config, parallel, sparse_mesh=sparse)
        optimizer = torch.optim.SGD(moe.parameters(), lr=1e-2)
        x = split(x_BLD, moe.layout.input, dense)[dist.get_rank()]
        for _ in range(steps):
            optimizer.zero_grad()
            with typecheck(), ledger() as record:
                assert_type(x, moe.input_types(SEQ_LEN))
                loss = moe(x, seq_len=SEQ_LEN).square().sum()  # Partial: shares of one sum
                loss.backward()
            reduce_gradients(moe, meshes=moe.meshes)  # once, over the axes of the types
            clip_grad_norm_(moe, 1.0, meshes=moe.meshes)
            optimizer.step()
            losses.append(loss.item())
        sent = [
            f"{entry.kind} over {entry.axis}" + ", backward" * entry.backward
            for entry in record.entries
        ]
        return losses, sent, moe.router.w_gate_ED.detach()


def main() -> None:
    ranks = run_ranks(parallel.dense_mesh(), train, 3)
    print("collectives of a step:", *ranks[0][1], sep="\n  ")
    assert all(torch.equal(gate, ranks[0][2]) for _, _, gate in ranks)
    print("gate weights are bit-identical on all ranks after 3 steps")

    one = MoE(config)
    loss = one(x_BLD, seq_len=SEQ_LEN).square().sum().item()
    shares = [losses[0] for losses, _, _ in ranks]
    print(f"loss: {' + '.join(f'{s:.3f}' for s in shares)} = {sum(shares):.3f}")
    print(f"loss on one device: {loss:.3f}")
    assert abs(sum(shares) - loss) < 1e-3


if __name__ == "__main__":
    main()
