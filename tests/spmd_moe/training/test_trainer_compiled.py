"""The language model with compiled blocks trains as without: losses equal to the bit."""

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from placements import as_mesh, typecheck, verify
from placements.testing import device_mesh, run_ranks
from spmd_moe import Parallel
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.trainer import Trainer

RECIPE = Recipe(batch=4, seq_len=6, dim=8, heads=2, hidden_dim=8, num_experts=4)
STEPS = 5
# aot_eager traces forward and backward as inductor does, and runs the ops of eager mode.
BACKEND = "aot_eager"


def losses(
    parallel: Parallel, fsdp: bool, backend: str | None
) -> tuple[list[float], list[int]]:
    """The losses, and how many graphs there were after each step.

    The first step is type-checked and the fourth verified, as those of the command are.
    """
    torch._dynamo.reset()
    counters.clear()
    meshes = (device_mesh(m) for m in (parallel.dense_mesh(), parallel.sparse_mesh()))
    trainer = Trainer(RECIPE, parallel, *map(as_mesh, meshes), fsdp=fsdp, backend=backend)
    found: list[float] = []
    graphs: list[int] = []
    for number in range(1, STEPS + 1):
        checking = {1: typecheck, 4: verify}.get(number, nullcontext)
        found.append(trainer.step(number, checking()))
        graphs.append(counters["stats"]["unique_graphs"])
    return found, graphs


@pytest.mark.parametrize(
    ("parallel", "fsdp"),
    [(Parallel(), False), (Parallel(dp=2, ep=2), False), (Parallel(dp=2, ep=2), True)],
    ids=["one process", "two", "two, FSDP2"],
)
def test_losses_are_those_without(parallel: Parallel, fsdp: bool) -> None:
    ways = [
        run_ranks(
            parallel.num_ranks, losses, parallel, fsdp, backend,
            backend="gloo", timeout=400,
        )
        for backend in (None, BACKEND)
    ]  # fmt: skip
    for (wanted, none), (found, graphs) in zip(*ways, strict=True):
        assert found == wanted
        assert none == [0] * STEPS
        assert graphs == [0, 1, 1, 1, 1]  # both blocks have one graph; checked steps none


@pytest.mark.deep
def test_inductor_computes_the_same_losses_but_for_rounding() -> None:
    """Some minutes of a C++ compiler."""
    parallel = Parallel(dp=2, ep=2)
    ways = [
        run_ranks(2, losses, parallel, False, backend, backend="gloo", timeout=2000)
        for backend in (None, "inductor")
    ]
    for (wanted, _), (found, graphs) in zip(*ways, strict=True):
        assert found == pytest.approx(wanted, rel=1e-12) and graphs[-1] == 1
