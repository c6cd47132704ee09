"""Step 4: parameters sharded by FSDP2, saved in pieces, and resumed on other ranks.

Which ranks hold shards, along which dim, and that gradients are summed: all of it is read
from the types that step 2 declared.
"""

from tempfile import TemporaryDirectory

import step1_plain as plain
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from step1_plain import CONFIG, SEQ_LEN, STEPS, Model
from step2_typed import PARALLEL, make_model
from step3_auxiliary import NUMBERS

import placements
from placements import (
    Shard,
    clip_grad_norm_,
    global_mean,
    load_sharded_state_dict,
    reduce_gradients,
    set_current_mesh,
    sharded_state_dict,
    split,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE

SAVED_AFTER = 2  # steps


def train(folder: str) -> list[float]:
    losses: list[float] = []
    mesh = device_mesh(PARALLEL.dense_mesh())
    with set_current_mesh(mesh):
        model = make_model()
        stream, meshes = model.moe.layout.input, model.moe.meshes
        placements.fully_shard(model, meshes=meshes)  # before the optimizer is made
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        cut = [a for a, t in stream.items() if isinstance(t, Shard) and mesh[a].size() > 1]
        for step in range(SAVED_AFTER):
            optimizer.zero_grad()
            x_BLD, target_BLD = (
                split(t, stream, mesh)[dist.get_rank()] for t in plain.batch(step)
            )
            total = (model(x_BLD) - target_BLD).square().sum()
            loss = global_mean(total, NUMBERS, cut)
            loss.backward()
            reduce_gradients(model, meshes=meshes)  # what FSDP2 leaves: tp
            clip_grad_norm_(model, 1.0, meshes=meshes)
            optimizer.step()
            losses.append(loss.item())
        dcp.save(sharded_state_dict(model, optimizer, meshes=meshes), checkpoint_id=folder)
    return losses


def resume(folder: str) -> list[float]:
    """Go on on one device: the checkpoint holds global tensors and knows no mesh."""
    with set_current_mesh({}):
        model = Model(MoE(CONFIG, seed=5))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        load_sharded_state_dict(model, folder, optimizer)
        losses: list[float] = []
        for step in range(SAVED_AFTER, STEPS):
            x_BLD, target_BLD = plain.batch(step)
            losses.append((model(x_BLD) - target_BLD).square().mean().item())
    return losses


if __name__ == "__main__":
    assert SEQ_LEN % 2 == 1  # cut unevenly, and nothing is padded
    with TemporaryDirectory() as folder:
        losses = run_ranks(PARALLEL.dense_mesh(), train, folder)[0] + resume(folder)
    torch.testing.assert_close(losses, plain.train(), rtol=1e-5, atol=0)
    print("two steps under FSDP2, then one device:", *(f"{x:.6f}" for x in losses))
