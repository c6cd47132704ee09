"""Step 2: the same loop on 4 ranks, typed. Changed lines are marked.

The ranks are simulated in this process. Under torchrun the body of `train` is the same,
with `init_device_mesh` in place of `device_mesh`.
"""

from contextlib import nullcontext

import step1_plain as plain
import torch
import torch.distributed as dist
from step1_plain import BATCH, CONFIG, SEQ_LEN, STEPS, Model

from placements import (
    I,
    R,
    Shard,
    assert_type,
    clip_grad_norm_,
    declare,
    global_mean,
    reduce_gradients,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, Parallel

PARALLEL = Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)


def make_model() -> Model:
    model = Model(MoE(CONFIG, PARALLEL))  # the layer declares its own parameters
    stream = model.moe.layout.input
    # R where ranks have tokens of their own: their gradients are summands of one sum.
    # I where all ranks repeat one computation: each has the whole gradient already.
    weight = {axis: R if isinstance(t, Shard) else I for axis, t in stream.items()}
    declare(model, {"norm_D": weight, "out_DD": weight})
    return model


def train() -> list[float]:
    losses: list[float] = []
    mesh = device_mesh(PARALLEL.dense_mesh())
    with set_current_mesh(mesh):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        stream, meshes = model.moe.layout.input, model.moe.meshes
        cut = [axis for axis, t in stream.items() if isinstance(t, Shard)]
        cut = [axis for axis in cut if mesh[axis].size() > 1]
        for step in range(STEPS):
            optimizer.zero_grad()
            pieces = (split(t, stream, mesh)[dist.get_rank()] for t in plain.batch(step))
            x_BLD, target_BLD = pieces  # a loader gives each rank its piece
            with typecheck() if step == 0 else nullcontext():  # types do not change
                assert_type(x_BLD, model.moe.input_types(SEQ_LEN))
                assert_type(target_BLD, model.moe.input_types(SEQ_LEN))
                total = (model(x_BLD) - target_BLD).square().sum()  # not a mean of means
                loss = global_mean(total, BATCH * SEQ_LEN * CONFIG.dim, cut)
                loss.backward()
                reduce_gradients(model, meshes=meshes)  # once, over the axes of the types
            clip_grad_norm_(model, 1.0, meshes=meshes)  # the norm over all ranks
            optimizer.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    one, ranks = plain.train(), run_ranks(PARALLEL.dense_mesh(), train)
    print("losses on 4 ranks:", *(f"{loss:.6f}" for loss in ranks[0]))
    for losses in ranks:
        torch.testing.assert_close(losses, one, rtol=1e-5, atol=0)
    print("equal to one device")
