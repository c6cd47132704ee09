"""The model on every kind of mesh: types and values hold, losses are those of one device."""

from contextlib import nullcontext
from typing import Any

import pytest

from placements import gradient_axes, set_current_mesh, typecheck, verify
from placements.testing import device_mesh, run_ranks
from placements.types.mesh import as_mesh
from spmd_moe import Parallel
from spmd_moe.training.language_model import LanguageModel
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.trainer import Trainer, one_device

# 7 positions: over cp=2 and tp=2 every rank holds another number of them.
RECIPE = Recipe(layers=2, dim=8, heads=4, hidden_dim=8, num_experts=4, seq_len=7, batch=4)
STEPS = 3

PARALLELS = [
    Parallel(dp=2, ep=2),
    Parallel(tp=2),
    Parallel(tp=2, sequence_parallel=True),
    Parallel(cp=2, tp=2, ep=2),
    Parallel(cp=2, tp=2, ep=4, sequence_parallel=True),
    Parallel(dp=2, tp=2, ep=2, sequence_parallel=True),
    Parallel(dp=2, cp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
]


def losses(parallel: Parallel, checked: bool) -> list[float]:
    dense, sparse = device_mesh(parallel.dense_mesh()), device_mesh(parallel.sparse_mesh())
    trainer = Trainer(RECIPE, parallel, as_mesh(dense), as_mesh(sparse))
    modes: list[Any] = (
        [verify, typecheck, nullcontext] if checked else [nullcontext] * STEPS
    )
    return [trainer.step(step, mode()) for step, mode in enumerate(modes, start=1)]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    twin = one_device(RECIPE)
    return [twin.step(step, nullcontext()) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("parallel", PARALLELS, ids=str)
def test_losses_are_those_of_one_device(parallel: Parallel, expected: list[float]) -> None:
    for of_rank in run_ranks(parallel.dense_mesh(), losses, parallel, True):
        assert of_rank == pytest.approx(expected, rel=1e-12)


def test_losses_are_the_same_without_checks(expected: list[float]) -> None:
    parallel = Parallel(cp=2, tp=2, ep=2, sequence_parallel=True)
    for of_rank in run_ranks(parallel.dense_mesh(), losses, parallel, False):
        assert of_rank == pytest.approx(expected, rel=1e-12)


def twin_beside() -> float:
    return one_device(RECIPE).step(1, nullcontext())


def test_the_twin_can_be_trained_by_a_rank(expected: list[float]) -> None:
    for loss in run_ranks({"tp": 2}, twin_beside):
        assert loss == expected[0]


def test_the_loss_falls() -> None:
    twin = one_device(RECIPE)
    found = [twin.step(step, nullcontext()) for step in range(1, 41)]
    assert sum(found[-5:]) < 0.8 * sum(found[:5])


def test_gradients_are_due_where_ranks_have_tokens_of_their_own() -> None:
    parallel = Parallel(dp=2, cp=2, tp=2, ep=2)
    for tp_cuts in (True, False):
        parallel = Parallel(dp=2, cp=2, tp=2, ep=2, sequence_parallel=tp_cuts)
        with set_current_mesh(parallel.dense_mesh()):
            model = LanguageModel(RECIPE, parallel)
            meshes = (parallel.dense_mesh(), parallel.sparse_mesh())
            axes = gradient_axes(model, meshes=meshes)
        tokens = ("dp", "cp", "tp") if tp_cuts else ("dp", "cp")
        assert axes["head_UD"] == axes["embedding.w_UD"] == axes["norm.w_D"] == tokens
        assert axes["embedding.positions_LD"] == ("dp",)
        assert axes["blocks.0.attention.wq_CD"] == ("dp", "cp")


def test_layers_start_from_weights_of_their_own() -> None:
    first, second = one_device(RECIPE).model.blocks
    for name, weight in first.named_parameters():
        if "norm" not in name:
            assert not weight.equal(second.get_parameter(name)), name
