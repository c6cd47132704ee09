"""A few training steps as a program of its own: what `torchrun` starts on every rank.

Prints one line of JSON on rank 0: the loss of every step, and whether the gate weights
are bit-identical on all ranks at the end.
"""

import argparse
import gc
import json
import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from placements import reduce_gradients, set_current_mesh, split
from spmd_moe import MoE, MoEConfig, Parallel

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1)
SEQ_LEN = 5
TIMEOUT = timedelta(seconds=10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--die-at", type=int, help="rank 1 is killed in this step")
    options = parser.parse_args()
    parallel = Parallel(**options.parallel)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    dense = init_device_mesh(
        "cpu",
        tuple(parallel.dense_mesh().values()),
        mesh_dim_names=tuple(parallel.dense_mesh()),
    )
    with set_current_mesh(dense):
        moe = MoE(CONFIG, parallel)
        x_BLD = torch.randn(4, SEQ_LEN, 8, generator=torch.Generator().manual_seed(0))
        x = split(x_BLD, moe.layout.input, dense)[dist.get_rank()]
        optimizer = torch.optim.SGD(moe.parameters(), lr=1e-4)
        losses: list[float] = []
        for step in range(options.steps):
            if step == options.die_at and dist.get_rank() == 1:
                kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
                moe.experts.register_forward_pre_hook(kill)
            optimizer.zero_grad()
            share = moe(x, seq_len=SEQ_LEN).square().sum()
            share.backward()
            meshes = (dense,) if parallel.ep == 1 else (dense, moe.dispatcher.mesh)
            reduce_gradients(moe, meshes=meshes)
            optimizer.step()
            # Without sequence parallelism all tp ranks hold the same share.
            copies = 1 if parallel.sequence_parallel else parallel.tp
            total = share.detach().double() / copies
            dist.all_reduce(total)
            losses.append(total.item())
    gates = [torch.empty_like(moe.router.w_gate_ED) for _ in range(dist.get_world_size())]
    dist.all_gather(gates, moe.router.w_gate_ED.detach())
    same = all(torch.equal(gate, gates[0]) for gate in gates)
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "gates_are_equal": same}))
    dist.barrier()  # nobody leaves while another rank still receives
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Meshes and their groups refer to each other. Groups that are left to the end of the
    # interpreter can abort it, where their threads let go of tensors.
    gc.collect()
