"""`dcp.save(module.state_dict())` writes every rank's pieces, or refuses."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh

from placements import (
    P,
    R,
    S,
    V,
    declare,
    fully_shard,
    global_state_dict,
    load_global_state_dict,
    load_sharded_state_dict,
    set_current_mesh,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from spmd_moe import MoE, MoEConfig, Parallel
from tests.support.sharded_layer import NOT_FOR_FSDP, ONE, VALUES, Layer

CONFIG = MoEConfig(dim=8, hidden_dim=8, num_experts=4, top_k=2, num_shared_experts=1)
MESH = {"dp": 1, "ep": 2, "tp": 2}


def save_plain(directory: Path) -> None:
    device = device_mesh()
    layer = Layer(MESH, device.get_rank(), filled=True)
    with set_current_mesh(device):
        state = layer.state_dict()
        dcp.save(state, checkpoint_id=directory / "bare")
        dcp.save({"model": layer}, checkpoint_id=directory / "stateful")
        dcp.save(copy.deepcopy(state), checkpoint_id=directory / "copied")
        kept = layer.state_dict(keep_vars=True)
        dcp.save({"model": kept}, checkpoint_id=directory / "kept")
        future: Any = dcp.async_save(state, checkpoint_id=directory / "later")
        with torch.no_grad():
            for p in layer.parameters():
                p.fill_(-1)
        future.result()


def test_pieces_of_all_ranks_are_saved(tmp_path: Path) -> None:
    run_ranks(MESH, save_plain, tmp_path, backend="gloo")
    for name in ("bare", "stateful", "copied", "kept", "later"):
        layer = Layer(ONE, 0, filled=False)
        load_sharded_state_dict(layer, tmp_path / name)
        for key, value in layer.state_dict().items():
            assert torch.equal(value, VALUES[key]), (name, key)


def save_sharded(directory: Path) -> None:
    device = device_mesh()
    layer = Layer({"dp": 2, "ep": 1, "tp": 2}, device.get_rank(), filled=True)
    with set_current_mesh(device):
        fully_shard(layer, ignored_params=[layer.get_parameter(n) for n in NOT_FOR_FSDP])
        dcp.save(layer.state_dict(), checkpoint_id=directory)


def test_pieces_of_fsdp_and_tp_are_saved(tmp_path: Path) -> None:
    run_ranks({"dp": 2, "ep": 1, "tp": 2}, save_sharded, tmp_path, backend="gloo")
    layer = Layer(ONE, 0, filled=False)
    load_sharded_state_dict(layer, tmp_path)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, VALUES[key]), key


def save_moe(directory: Path) -> dict[str, Any]:
    with set_current_mesh(device_mesh()):
        moe = MoE(CONFIG, Parallel(dp=2, tp=2, ep=2), seed=3)
    # The mesh of the experts is another one than that of the rest; neither is current.
    dcp.save(moe.state_dict(), checkpoint_id=directory)
    return global_state_dict(moe, meshes=moe.meshes)


def test_experts_on_a_mesh_of_their_own_are_saved(tmp_path: Path) -> None:
    expected, *_ = run_ranks(
        {"dp": 2, "cp": 1, "tp": 2}, save_moe, tmp_path, backend="gloo"
    )
    moe = MoE(CONFIG, seed=4)
    load_sharded_state_dict(moe, tmp_path)
    found = moe.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def refused(types: Any, how: str, directory: Path) -> None:
    module = nn.Linear(4, 4, bias=False)
    declare(module, {"weight": types})
    if how == "ambiguous":
        other = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "ep"))
        with set_current_mesh(other), set_current_mesh(device_mesh()), set_current_mesh({}):
            dcp.save(module.state_dict(), checkpoint_id=directory)
    elif how == "unknown":
        dcp.save(module.state_dict(), checkpoint_id=directory)
    elif how == "load":
        with set_current_mesh(device_mesh()):
            dcp.save({"weight": torch.zeros(4, 4)}, checkpoint_id=directory)
            dcp.load(module.state_dict(), checkpoint_id=directory)
    else:
        with set_current_mesh(device_mesh()):
            dcp.save(module.state_dict(), checkpoint_id=directory)


@pytest.mark.parametrize(
    ("types", "how", "said"),
    [
        ({"dp": R, "ep": P}, "", "is Partial on axis 'ep'"),
        ({"dp": R, "ep": S(0), "tq": R}, "", "no mesh is known"),
        ({"dp": R, "ap": S(0)}, "unknown", "no mesh is known"),
        ({"dp": R, "ep": S(0)}, "ambiguous", "meshes in use differ"),
        ({"dp": R, "ep": S(0)}, "load", "is the piece of one rank"),
    ],
)
def test_what_cannot_be_right_is_refused(
    types: Any, how: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailure, match=said):
        run_ranks({"dp": 2, "ep": 2}, refused, types, how, tmp_path, backend="gloo")


def varying(directory: Path) -> None:
    module = nn.Linear(2, 2, bias=False)
    rank = device_mesh().get_rank()
    nn.init.constant_(module.weight, rank)
    declare(module, {"weight": {"ep": V}})
    with set_current_mesh(device_mesh()):
        dcp.save(module.state_dict(), checkpoint_id=directory)
        nn.init.constant_(module.weight, -1)
        load_sharded_state_dict(module, directory)
    assert module.weight.unique().tolist() == [rank]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_own_values_of_ranks_are_stacked(tmp_path: Path) -> None:
    run_ranks({"ep": 2}, varying, tmp_path, backend="gloo")
    whole = {"weight": torch.empty(2, 2, 2)}
    dcp.load(whole, checkpoint_id=tmp_path, no_dist=True)
    assert whole["weight"][:, 0, 0].tolist() == [0, 1]


def test_a_state_dict_is_otherwise_as_ever() -> None:
    layer = Layer(ONE, 0, filled=True)
    state = layer.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert all(type(t) is torch.Tensor and not vars(t) for t in loaded.values())
    for assign in (False, True):
        other = copy.deepcopy(Layer(ONE, 0, filled=False))
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other.get_parameter("gate.weight"), VALUES["gate.weight"])
    load_global_state_dict(other, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_device_needs_no_mesh(tmp_path: Path) -> None:
    layer = Layer(ONE, 0, filled=True)
    dcp.save(layer.state_dict(), checkpoint_id=tmp_path)
    other = Layer(ONE, 0, filled=False)
    load_sharded_state_dict(other, tmp_path)
    assert torch.equal(other.get_parameter("gate.weight"), VALUES["gate.weight"])
    with (
        set_current_mesh({"dp": 1, "ep": 2, "tp": 1}),
        pytest.raises(CheckpointException, match="no mesh is known"),
    ):
        dcp.save(layer.state_dict(), checkpoint_id=tmp_path / "pieces")
