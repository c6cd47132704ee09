"""A bit that flips in a checkpoint is found, or was of no importance."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from placements import load_sharded_state_dict, sharded_state_dict
from placements.testing import run_ranks
from spmd_moe import Parallel
from spmd_moe.training import checkpoints, manifest
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.trainer import Trainer
from spmd_moe.training.world import meshes_of
from tests.faults.bit_flips import State, check_bit_flips, judge_flips

RECIPE = Recipe(
    layers=1, dim=8, heads=4, hidden_dim=8, num_experts=4, seq_len=7, batch=4, lr=0.03
)


def saved(directory: Path) -> None:
    parallel = Parallel(tp=2, ep=2)
    trainer = Trainer(RECIPE, parallel, *meshes_of(parallel))
    trainer.step(1, nullcontext())
    checkpoints.save(trainer, directory, 1, mesh="tp=2,ep=2", keep=1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    run_ranks(2, saved, directory, backend="gloo")
    (path,) = manifest.checkpoints_in(directory)
    return path


def test_some_flips(written: Path) -> None:
    found = check_bit_flips(written, 60)
    refused = sum(count for said, count in found.items() if said.endswith("refused"))
    assert refused > 40, found


@pytest.mark.deep
def test_a_thousand_flips(written: Path) -> None:
    found = check_bit_flips(written, 1000, seed=1)
    assert found.total() == 1000
    print(dict(found))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_flips_in_the_index_of_a_users_checkpoint(tmp_path: Path) -> None:
    """It has no manifest, but its index is checked, so pieces are where they were."""
    module = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    dcp.save(sharded_state_dict(module, optimizer), checkpoint_id=tmp_path)
    index = tmp_path / manifest.INDEX
    index.chmod(0o600)

    def loaded() -> State:
        other = torch.nn.Linear(3, 4)
        load_sharded_state_dict(other, tmp_path)
        return dict(other.state_dict())

    only = tmp_path / "only"
    only.mkdir()
    index.rename(only / manifest.INDEX)
    index.hardlink_to(only / manifest.INDEX)
    found = judge_flips(only, 200, loaded, (ValueError,))
    assert found[f"{manifest.INDEX} refused"] > 100, found
