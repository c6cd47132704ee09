"""What is saved inside a block holds no types: it loads without this package."""

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from placements import (
    I,
    P,
    R,
    S,
    V,
    all_reduce,
    assert_type,
    convert,
    declare,
    pad_rows,
    reduce_gradients,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks

MESH = {"dp": 2, "tp": 2}

# Whoever loads the file has never heard of this package.
READER = """
import pickle, sys, warnings
sys.modules["placements"] = sys.modules["spmd_moe"] = None
import torch
from torch import nn
torch.serialization.add_safe_globals([nn.Linear, set])
kind, path = sys.argv[1:]
if kind == "pickle":
    with open(path, "rb") as file:
        found = pickle.load(file)
elif kind == "dcp":
    import torch.distributed.checkpoint as dcp
    warnings.simplefilter("ignore")
    found = {"weight": torch.zeros(2, 4)}
    dcp.load(found, checkpoint_id=path)
else:
    import torch.distributed.tensor
    found = torch.load(path, weights_only=True)
def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, nn.Module):
        yield from value.parameters()
some = list(tensors(found))
assert some
assert not any(key.startswith("_placements") for one in some for key in vars(one)), some
print([float(one.sum()) for one in some])
"""


def read(kind: str, path: Path) -> list[float]:
    command = [sys.executable, "-c", READER, kind, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return eval(done.stdout)


def typed_linear() -> nn.Linear:
    linear = nn.Linear(4, 2)
    declare(linear, {"weight": {"dp": R, "tp": S(0)}, "bias": {"dp": R, "tp": S(0)}})
    x = assert_type(torch.ones(3, 4), {"dp": S(0), "tp": R})
    (linear(x) ** 2).sum().backward()
    reduce_gradients(linear)
    return linear


def values() -> dict[str, Any]:
    """Things that have a type inside a block."""
    linear = typed_linear()
    weight: Any = linear.weight
    cut = assert_type(torch.ones(2, 4), {"dp": S(0), "tp": S(1)})
    pending = cut.sum()
    rows = assert_type(torch.ones(3, 4), {"dp": R, "tp": I})
    padded, valid = pad_rows(rows, 0, to=5)
    varying = assert_type(torch.ones(2), {"dp": V, "tp": V}).detach()
    return {
        "tensor": cut,
        "view": cut.t(),
        "partial": all_reduce(pending, "tp", src=P, dst=I),
        "alias": convert(padded, "tp", src=I, dst=R),
        "mask": valid,
        "index": torch.topk(varying, 1).indices,
        "factory": torch.zeros(3),
        "parameter": weight,
        "gradient": weight.grad,
        "state dict": linear.state_dict(),
        "state dict with parameters": linear.state_dict(keep_vars=True),
    }


KINDS = [
    "tensor", "view", "partial", "alias", "mask", "index", "factory", "parameter",
    "gradient", "state dict", "state dict with parameters",
]  # fmt: skip


@pytest.mark.parametrize("when", ["inside", "after"])
def test_what_a_block_saves_loads_without_the_package(when: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    with set_current_mesh(MESH), typecheck():
        found = values()
        assert list(found) == KINDS and type_of(found["tensor"]) == {"dp": S(0), "tp": S(1)}
        if when == "inside":
            torch.save(found, path)
    if when == "after":
        torch.save(found, path)
    assert len(read("torch", path)) == len(KINDS) + 2


def test_pickle_holds_no_types_either(tmp_path: Path) -> None:
    path = tmp_path / "saved.pickle"
    with set_current_mesh(MESH), typecheck():
        path.write_bytes(pickle.dumps(values()["state dict"]))
    assert len(read("pickle", path)) == 2


def test_a_whole_module_whose_tensors_were_given_types(tmp_path: Path) -> None:
    path = tmp_path / "module.pt"
    with set_current_mesh(MESH), typecheck():
        linear = nn.Linear(4, 2)
        assert_type(linear.weight, {"dp": R, "tp": S(0)})
        assert_type(linear.bias, {"dp": R, "tp": S(0)})
        torch.save(linear, path)
    assert len(read("torch", path)) == 2


def test_the_state_of_an_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.pt"
    with set_current_mesh(MESH):
        with typecheck():
            linear = typed_linear()
        optimizer = torch.optim.Adam(linear.parameters())
        optimizer.step()
        with typecheck():
            torch.save(optimizer.state_dict(), path)
    assert len(read("torch", path)) == 6


@pytest.mark.filterwarnings("ignore")
def test_a_distributed_checkpoint(tmp_path: Path) -> None:
    with set_current_mesh(MESH), typecheck():
        weight = {"weight": typed_linear().weight.detach()}
        total = weight["weight"].detach().clone()
        dcp.save(weight, checkpoint_id=tmp_path / "dcp")
    assert read("dcp", tmp_path / "dcp") == pytest.approx([float(total.sum())])


def save_dtensor(path: str) -> None:
    mesh = device_mesh()
    with set_current_mesh(mesh):
        tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Replicate()])
        if mesh.get_rank() == 0:
            torch.save({"weight": tensor.to_local(), "mesh": mesh}, path)


def test_a_device_mesh_that_was_current_is_saved_without_ours(tmp_path: Path) -> None:
    path = tmp_path / "dtensor.pt"
    run_ranks(MESH, save_dtensor, str(path))
    assert read("torch", path) == [2.0]


def test_copies_in_memory() -> None:
    """deepcopy of a tensor keeps its type; what goes through a pickle has none."""
    with set_current_mesh(MESH), typecheck():
        x = assert_type(torch.ones(2, 4), {"dp": S(0), "tp": R})
        assert type_of(copy.deepcopy(x)) == {"dp": S(0), "tp": R}
        loaded: Tensor = pickle.loads(pickle.dumps(x))
        assert type_of(loaded) is None and type_of(x) == {"dp": S(0), "tp": R}
        assert type_of(assert_type(loaded, {"dp": S(0), "tp": R})) == type_of(x)
        buffer = io.BytesIO()
        torch.save(x, buffer)
        buffer.seek(0)
        assert type_of(torch.load(buffer)) is None


def test_other_attributes_of_a_tensor_are_saved_as_ever() -> None:
    x: Any = torch.ones(2)
    x.note = "mine"
    with set_current_mesh(MESH), typecheck():
        assert_type(x, {"dp": R, "tp": R})
    assert vars(pickle.loads(pickle.dumps(x))) == {"note": "mine"}
