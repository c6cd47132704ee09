"""Saved in pieces on one mesh, loaded on any other, with the optimizer, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from placements import (
    fully_shard,
    load_sharded_state_dict,
    set_current_mesh,
    sharded_state_dict,
    split,
)
from placements.testing import device_mesh, run_ranks
from tests.support.sharded_layer import (
    NOT_FOR_FSDP,
    ONE,
    OPTIMIZERS,
    Layer,
    on_one_device,
    stepped,
    types_on,
    values_of,
)

SAVED, STEPS = 2, 4


def save(mesh: dict[str, int], directory: Path, how: str, fsdp: bool) -> None:
    """Train and save with each optimizer, in a directory of its own."""
    device = device_mesh()
    rank = device.get_rank()
    with set_current_mesh(device):
        for kind, make in OPTIMIZERS.items():
            layer = Layer(mesh, rank, filled=True)
            if fsdp:
                fully_shard(
                    layer, ignored_params=[layer.get_parameter(n) for n in NOT_FOR_FSDP]
                )
            optimizer = make(layer)
            stepped(layer, optimizer, range(SAVED), mesh, rank)
            state = sharded_state_dict(layer, optimizer)
            state["epoch"] = {"number": 7, "name": "seventh"}
            path = directory / kind
            if how == "save":
                dcp.save(state, checkpoint_id=path)
                continue
            stager = BlockingAsyncStager() if how == "blocking" else None
            future: Any = dcp.async_save(state, checkpoint_id=path, async_stager=stager)
            with torch.no_grad():  # what is written must be a copy
                for p in layer.parameters():
                    p.fill_(-1)
            getattr(future, "upload_completion", future).result()


def load(mesh: dict[str, int], directory: Path, fsdp: bool) -> dict[str, Any]:
    """Load each optimizer's checkpoint into new modules and go on; the values after."""
    device = device_mesh()
    rank = device.get_rank()
    found: dict[str, Any] = {}
    with set_current_mesh(device):
        for kind, make in OPTIMIZERS.items():
            layer = Layer(mesh, rank, filled=False)
            if fsdp:
                fully_shard(
                    layer, ignored_params=[layer.get_parameter(n) for n in NOT_FOR_FSDP]
                )
            optimizer = make(layer)
            for group in optimizer.param_groups:
                group["lr"] = -1.0  # that of the checkpoint counts
            also: dict[str, Any] = {"epoch": {"number": 0, "name": ""}}
            before = {name: p for name, p in layer.named_parameters()}
            load_sharded_state_dict(layer, directory / kind, optimizer, also=also)
            assert also == {"epoch": {"number": 7, "name": "seventh"}}
            assert all(p is before[name] for name, p in layer.named_parameters())
            stepped(layer, optimizer, range(SAVED, STEPS), mesh, rank)
            values = values_of(layer, optimizer)
            if fsdp:
                values = {
                    k: getattr(v, "full_tensor", lambda v=v: v)() for k, v in values.items()
                }
            found[kind] = {k: v.detach().clone() for k, v in values.items()}
    return found


def check(mesh: dict[str, int], ranks: list[dict[str, Any]]) -> None:
    for kind, make in OPTIMIZERS.items():
        expected = on_one_device(make, STEPS)
        for rank, found in enumerate(ranks):
            assert found[kind].keys() == expected.keys(), kind
            for key, whole in expected.items():
                name = key.partition(".")[2]
                name = name if key.startswith("model.") else name.partition(".")[2]
                is_number = whole.dim() == 0
                piece = (
                    whole if is_number else split(whole, types_on(mesh)[name], mesh)[rank]
                )
                ours: Tensor = found[kind][key]
                assert torch.equal(ours, piece) and ours.dtype == piece.dtype, (kind, key)


def mesh_of(dp: int, ep: int, tp: int) -> dict[str, int]:
    return {"dp": dp, "ep": ep, "tp": tp}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("on_1_2_2")
    run_ranks(
        mesh_of(1, 2, 2), save, mesh_of(1, 2, 2), directory, "save", False, backend="gloo"
    )
    return directory


@pytest.mark.parametrize("mesh", [(1, 2, 2), (2, 1, 1), (1, 3, 1), (1, 1, 3), (2, 1, 2)])
def test_saved_on_one_mesh_continued_on_another(
    saved: Path, mesh: tuple[int, int, int]
) -> None:
    there = mesh_of(*mesh)
    check(there, run_ranks(there, load, there, saved, False, backend="gloo"))


def test_continued_on_one_device(saved: Path) -> None:
    with set_current_mesh({}):
        for kind, make in OPTIMIZERS.items():
            layer = Layer(ONE, 0, filled=False)
            optimizer = make(layer)
            load_sharded_state_dict(layer, saved / kind, optimizer)
            stepped(layer, optimizer, range(SAVED, STEPS), ONE, 0)
            found = values_of(layer, optimizer)
            expected = on_one_device(make, STEPS)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert torch.equal(found[key], value), (kind, key)
            assert [g["lr"] for g in optimizer.param_groups] == [
                g["lr"] for g in make(layer).param_groups
            ]


@pytest.mark.parametrize("how", ["async", "blocking"])
def test_saved_while_training_goes_on(tmp_path: Path, how: str) -> None:
    mesh, other = mesh_of(1, 2, 1), mesh_of(1, 1, 2)
    run_ranks(mesh, save, mesh, tmp_path, how, False, backend="gloo")
    check(other, run_ranks(other, load, other, tmp_path, False, backend="gloo"))


@pytest.mark.parametrize(
    ("before", "after"),
    [((True, (2, 1, 2)), (False, (1, 2, 1))), ((False, (1, 2, 1)), (True, (2, 2, 1))),
     ((True, (2, 2, 1)), (True, (3, 1, 1)))],
)  # fmt: skip
def test_with_fsdp_and_without(tmp_path: Path, before: Any, after: Any) -> None:
    (was_sharded, first), (is_sharded, second) = before, after
    mesh, other = mesh_of(*first), mesh_of(*second)
    run_ranks(mesh, save, mesh, tmp_path, "save", was_sharded, backend="gloo")
    check(other, run_ranks(other, load, other, tmp_path, is_sharded, backend="gloo"))
