"""Step 3: auxiliary losses of the router, right whichever ranks have which tokens."""

import step1_plain as plain
import torch
import torch.distributed as dist
from step1_plain import CONFIG, SEQ_LEN, Model
from step2_typed import PARALLEL, make_model

from placements import (
    Mesh,
    Shard,
    assert_type,
    global_mean,
    set_current_mesh,
    split,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, keep_routings, load_balance_loss, z_loss

NUMBERS = plain.BATCH * SEQ_LEN * CONFIG.dim


def loss_of(model: Model, x_BLD: torch.Tensor, target_BLD: torch.Tensor) -> torch.Tensor:
    """The main loss and the auxiliary ones: all Invariant, so they can be added."""
    with keep_routings(model) as routings:  # of every forward in this block
        total = (model(x_BLD) - target_BLD).square().sum()
    mesh = model.moe.meshes[0]
    cut = [a for a, t in model.moe.layout.input.items() if isinstance(t, Shard)]
    loss = global_mean(total, NUMBERS, [axis for axis in cut if axis in mesh.sizes])
    for routed in routings:
        loss = loss + 0.01 * load_balance_loss(routed) + 1e-3 * z_loss(routed)
    return loss


def on_a_rank() -> float:
    mesh = device_mesh(PARALLEL.dense_mesh())
    with set_current_mesh(mesh):
        model = make_model()
        stream = model.moe.layout.input
        x_BLD, target_BLD = (
            split(t, stream, mesh)[dist.get_rank()] for t in plain.batch(0)
        )
        with typecheck():
            assert_type(x_BLD, model.moe.input_types(SEQ_LEN))
            assert_type(target_BLD, model.moe.input_types(SEQ_LEN))
            loss = loss_of(model, x_BLD, target_BLD)
            loss.backward()
    return loss.item()


if __name__ == "__main__":
    with set_current_mesh(Mesh({})):
        one = loss_of(Model(MoE(CONFIG)), *plain.batch(0)).item()
    for loss in run_ranks(PARALLEL.dense_mesh(), on_a_rank):
        assert abs(loss - one) < 1e-5, (loss, one)
    print(f"with auxiliary losses: {one:.6f} on one device and on every rank")
