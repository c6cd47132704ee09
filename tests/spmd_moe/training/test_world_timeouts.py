"""The timeout of a run is that of every process group of every mesh."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from placements._torch import groups
from placements.testing import run_ranks
from spmd_moe.config import Parallel
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.trainer import Trainer
from spmd_moe.training.world import meshes_of

RECIPE = Recipe(layers=1, dim=8, heads=2, hidden_dim=8, num_experts=4, seq_len=6, batch=4)
SECONDS = 7.0


def seconds_of_groups(parallel: Parallel, fsdp: bool) -> dict[str, float]:
    before = set(groups())
    meshes = meshes_of(parallel, SECONDS)
    Trainer(RECIPE, parallel, *meshes, fsdp=fsdp)
    found: dict[str, float] = {}
    for group in groups():
        if group not in before:
            backend: Any = group._get_backend(torch.device("cpu"))
            name = f"{dist.get_process_group_ranks(group)} {group.group_name} {group.group_desc}"
            found[name] = backend.options._timeout.total_seconds()
    return found


@pytest.mark.parametrize(
    ("parallel", "fsdp"),
    [
        (Parallel(dp=2, tp=2, ep=2), False),
        (Parallel(dp=2, tp=2, ep=2, etp=2), False),
        (Parallel(dp=2, tp=2, ep=2), True),
        (Parallel(dp=2, tp=2, ep=2, etp=2), True),
    ],
)
def test_every_group_of_both_meshes_has_the_timeout(parallel: Parallel, fsdp: bool) -> None:
    for found in run_ranks(4, seconds_of_groups, parallel, fsdp, backend="gloo"):
        assert len(found) >= 4 and set(found.values()) == {SECONDS}, found
