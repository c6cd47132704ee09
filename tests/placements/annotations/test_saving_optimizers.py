"""`dcp.save(optimizer.state_dict())` of parameters that are cut is refused, never lossy."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Adafactor, AdamW, Optimizer

from placements import (
    I,
    R,
    S,
    V,
    declare,
    fully_shard,
    set_current_mesh,
    sharded_state_dict,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoE, MoEConfig, Parallel

INSTEAD = r"save sharded_state_dict\(module, optimizer, meshes=...\) instead"


def stepped(module: nn.Module, kind: Callable[..., Any] = AdamW) -> Optimizer:
    optimizer = kind(module.parameters(), lr=1.0)
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer


def refused(state: dict[str, Any], directory: Path, said: str = INSTEAD) -> None:
    with pytest.raises(CheckpointException, match=said):
        dcp.save(state, checkpoint_id=directory)


def saved_whole(state: dict[str, Any], directory: Path) -> None:
    dcp.save(state, checkpoint_id=directory)
    names: Any = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    assert any(name.endswith("exp_avg") for name in names)


def linear(types: Any) -> nn.Linear:
    module = nn.Linear(4, 4, bias=False)
    declare(module, {"weight": types})
    return module


def ways(directory: Path) -> None:
    module = linear({"dp": R, "ep": S(0)})
    optimizer = stepped(module)
    with set_current_mesh(device_mesh()):
        state = optimizer.state_dict()
        refused(state, directory)
        refused({"model": module, "optimizer": optimizer}, directory)
        refused(copy.deepcopy(state), directory)
        refused(get_optimizer_state_dict(module, optimizer), directory)
        with pytest.raises(CheckpointException, match=INSTEAD):
            later: Any = dcp.async_save(state, checkpoint_id=directory)
            later.result()
        dcp.save({"state": {0: {"exp_avg": torch.zeros(4, 4)}}}, checkpoint_id=directory)
        into = {"state": {0: {"exp_avg": optimizer.state_dict()["state"][0]["exp_avg"]}}}
        with pytest.raises(CheckpointException, match="load_sharded_state_dict"):
            dcp.load(into, checkpoint_id=directory)
        dcp.save(sharded_state_dict(module, optimizer), checkpoint_id=directory / "right")

        # A new optimizer that was loaded and has not stepped; copies of the module.
        other = AdamW(module.parameters())
        other.load_state_dict(optimizer.state_dict())
        refused(other.state_dict(), directory)
        copied = copy.deepcopy(module)
        refused(stepped(copied).state_dict(), directory)
        unpickled = pickle.loads(pickle.dumps(module))
        refused(stepped(unpickled).state_dict(), directory)

        # State of another shape: nothing says how it is cut.
        refused(stepped(module, Adafactor).state_dict(), directory)
    elsewhere = linear({"dp": R, "xp": S(0)})
    refused(stepped(elsewhere).state_dict(), directory, "no mesh is known")


def test_every_way_to_lose_pieces_is_refused(tmp_path: Path) -> None:
    run_ranks({"dp": 1, "ep": 2}, ways, tmp_path, backend="gloo")


def whole(directory: Path) -> None:
    with set_current_mesh(device_mesh()):
        for n, types in enumerate(({"dp": R, "ep": S(0)}, {"dp": I, "ep": V})):
            module = linear(types)
            saved_whole(stepped(module).state_dict(), directory / str(n))
        sharded = linear({"dp": R, "ep": S(0)})
        fully_shard(sharded)
        optimizer = stepped(sharded)
        saved_whole(optimizer.state_dict(), directory / "fsdp")
        saved_whole(get_optimizer_state_dict(sharded, optimizer), directory / "named")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_whole_is_saved_as_ever(tmp_path: Path) -> None:
    run_ranks({"dp": 2, "ep": 1}, whole, tmp_path, backend="gloo")
    found = {"state": {0: {"exp_avg": torch.zeros(4, 4)}}}
    dcp.load(found, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    assert found["state"][0]["exp_avg"].ne(0).all()


def sharded_twice(directory: Path) -> None:
    module = linear({"dp": R, "ep": S(0)})
    with set_current_mesh(device_mesh()):
        fully_shard(module)
        refused(stepped(module).state_dict(), directory)
        saved = sharded_state_dict(module, stepped(module))
        dcp.save(saved, checkpoint_id=directory / "right")


def test_pieces_that_fsdp_shards_again(tmp_path: Path) -> None:
    run_ranks({"dp": 2, "ep": 2}, sharded_twice, tmp_path, backend="gloo")


def experts(directory: Path) -> None:
    config = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2)
    with set_current_mesh(device_mesh()):
        moe = MoE(config, Parallel(dp=2, ep=2))
    optimizer = stepped(moe)
    refused({"optimizer": optimizer.state_dict()}, directory, "Shard|S\\(0\\)")
    dense = AdamW([p for name, p in moe.named_parameters() if "expert" not in name])
    for p in moe.parameters():
        p.grad = torch.ones_like(p)
    dense.step()
    saved_whole(dense.state_dict(), directory)


def test_experts_are_refused_and_what_all_ranks_hold_is_not(tmp_path: Path) -> None:
    run_ranks({"dp": 2, "cp": 1, "tp": 1}, experts, tmp_path, backend="gloo")


def test_a_state_dict_is_otherwise_as_ever() -> None:
    module = linear({"ep": S(0)})
    optimizer = stepped(module)
    with set_current_mesh({"ep": 2}):
        state = optimizer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["state"][0]
    assert not vars(loaded["exp_avg"]) and torch.equal(
        loaded["exp_avg"], state["state"][0]["exp_avg"]
    )
    other = AdamW(module.parameters())
    other.load_state_dict(state)
    assert torch.equal(
        other.state[module.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"]
    )
    # Once the mesh is gone, one device is as ever.
    assert not vars(optimizer.state_dict()["state"][0]["exp_avg"])
