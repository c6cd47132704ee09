"""A trainer as a user writes it: a MoE layer, AdamW, checkpoints by the public calls."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from placements import (
    clip_grad_norm_,
    fully_shard,
    load_sharded_state_dict,
    reduce_gradients,
    set_current_mesh,
    sharded_state_dict,
    split,
)
from placements.testing import device_mesh
from spmd_moe import MoE, MoEConfig, Parallel

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1)
SEQ_LEN, SAVED, STEPS = 5, 2, 5


class Run:
    """The layer and its optimizer on the mesh of this rank."""

    def __init__(self, parallel: Parallel, fsdp: bool, seed: int) -> None:
        self.mesh = device_mesh()
        with set_current_mesh(self.mesh):
            self.moe = MoE(CONFIG, parallel, seed=seed).double()
            if fsdp:
                fully_shard(self.moe, meshes=self.moe.meshes)
        self.copies = 1 if parallel.sequence_parallel else parallel.tp
        self.optimizer = torch.optim.AdamW(self.moe.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(4, SEQ_LEN, 8, generator=generator, dtype=torch.float64)
        self.optimizer.zero_grad()
        with set_current_mesh(self.mesh):
            x = split(whole, self.moe.layout.input, self.mesh)[dist.get_rank()]
            share = self.moe(x, seq_len=SEQ_LEN).square().sum()
            share.backward()
            reduce_gradients(self.moe, meshes=self.moe.meshes)
            clip_grad_norm_(self.moe, 1.0, meshes=self.moe.meshes)
        self.optimizer.step()
        self.schedule.step()
        total = share.detach() / self.copies
        dist.all_reduce(total)
        return total.item()

    def save(self, path: Path) -> Any:
        state = sharded_state_dict(self.moe, self.optimizer, meshes=self.moe.meshes)
        state["schedule"] = self.schedule.state_dict()
        # Steps go on meanwhile: the ranks must not meet in one group for both.
        own = dist.new_group(backend="gloo")
        return dcp.async_save(state, checkpoint_id=path, process_group=own)

    def load(self, path: Path) -> None:
        also = {"schedule": self.schedule.state_dict()}
        meshes = self.moe.meshes
        load_sharded_state_dict(self.moe, path, self.optimizer, meshes=meshes, also=also)
        self.schedule.load_state_dict(also["schedule"])


def uninterrupted(parallel: Parallel, fsdp: bool, path: Path) -> list[float]:
    """Losses of all steps; a checkpoint is written while the steps after it run."""
    run = Run(parallel, fsdp, seed=0)
    losses = [run.step(number) for number in range(SAVED)]
    writing = run.save(path)
    losses += [run.step(number) for number in range(SAVED, STEPS)]
    writing.result()
    return losses


def resumed(parallel: Parallel, fsdp: bool, path: Path) -> list[float]:
    run = Run(parallel, fsdp, seed=1)
    run.load(path)
    return [run.step(number) for number in range(SAVED, STEPS)]
