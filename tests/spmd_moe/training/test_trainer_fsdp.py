"""The language model, sharded by FSDP2 block by block, trains as on one device."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import placements
from placements import as_mesh, typecheck, verify
from placements.testing import device_mesh, run_ranks
from spmd_moe import Parallel
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.trainer import Trainer, one_device

RECIPE = Recipe(batch=4, seq_len=6, dim=16, hidden_dim=8, num_experts=4)
STEPS = 3
BLOCKS: dict[str, Any] = {
    "unchecked": nullcontext,
    "typecheck": typecheck,
    "verify": verify,
}


def losses(parallel: Parallel, block: str, recomputed: bool = False) -> list[float]:
    dense, sparse = (
        device_mesh(m) for m in (parallel.dense_mesh(), parallel.sparse_mesh())
    )
    trainer = Trainer(RECIPE, parallel, as_mesh(dense), as_mesh(sparse))
    model = trainer.model
    for k, part in enumerate(model.blocks):
        if recomputed:
            model.blocks[k] = checkpoint_wrapper(part)
        placements.fully_shard(model.blocks[k], meshes=trainer.meshes)
    placements.fully_shard(model, meshes=trainer.meshes)
    trainer.optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE.lr)
    return [trainer.step(number, BLOCKS[block]()) for number in range(STEPS)]


def wanted() -> list[float]:
    alone = one_device(RECIPE)
    return [alone.step(number, nullcontext()) for number in range(STEPS)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    "parallel",
    [Parallel(dp=2, tp=2, ep=2, sequence_parallel=True), Parallel(dp=2, cp=2, ep=4)],
    ids=str,
)
def test_losses_are_those_of_one_device(parallel: Parallel, block: str) -> None:
    for found in run_ranks(parallel.dense_mesh(), losses, parallel, block):
        assert found == pytest.approx(wanted(), rel=1e-12)


@pytest.mark.parametrize("block", ["unchecked", "typecheck"])
def test_blocks_that_are_computed_again_in_backward(block: str) -> None:
    parallel = Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)
    for found in run_ranks(parallel.dense_mesh(), losses, parallel, block, True):
        assert found == pytest.approx(wanted(), rel=1e-12)


def test_on_processes() -> None:
    parallel = Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)
    for found in run_ranks(4, losses, parallel, "typecheck", backend="gloo"):
        assert found == pytest.approx(wanted(), rel=1e-12)
