"""Loading a checkpoint runs nothing, and what does not fit is refused by name."""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from placements import (
    P,
    R,
    S,
    declare,
    load_sharded_state_dict,
    set_current_mesh,
    sharded_state_dict,
)
from placements._torch.pickled import NotPlain, read_pickle
from placements.testing import RankFailure, device_mesh, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FIRED: list[str] = []


def fire(where: str) -> str:
    FIRED.append(where)
    return where


class Bomb:
    """Runs `fire` when it is unpickled."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return fire, (self.where,)


def test_the_bomb_is_one() -> None:
    pickle.loads(pickle.dumps(Bomb("here")))
    assert FIRED == ["here"]
    FIRED.clear()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    module = nn.Linear(3, 4)
    optimizer = stepped(module, torch.optim.AdamW(module.parameters()))
    state = sharded_state_dict(module, optimizer)
    state["epoch"] = 3
    dcp.save(state, checkpoint_id=tmp_path)
    FIRED.clear()
    return tmp_path


def stepped(module: nn.Module, optimizer: Any) -> Any:
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    return optimizer


def load(path: Path, optimizer: Any = None, **options: Any) -> nn.Linear:
    module = nn.Linear(3, 4)
    made = optimizer or torch.optim.AdamW
    load_sharded_state_dict(module, path, made(module.parameters()), **options)
    return module


def test_nothing_in_the_index_is_run(saved: Path) -> None:
    index = saved / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    names = ("planner_data", "version", "storage_data", "state_dict_metadata")
    for name in names:
        kept = getattr(metadata, name)
        setattr(metadata, name, Bomb(name))
        index.write_bytes(pickle.dumps(metadata))
        setattr(metadata, name, kept)
        with pytest.raises(ValueError, match=r"\.metadata is no index: it has") as caught:
            load(saved)
        assert "\n" not in str(caught.value)
    index.write_bytes(pickle.dumps(Bomb("all of it")))
    with pytest.raises(ValueError, match="where Metadata is needed"):
        load(saved)
    for protocol in (0, 1, 2):
        index.write_bytes(pickle.dumps(Bomb("an old pickle"), protocol))
        with pytest.raises(ValueError, match="opcode"):
            load(saved)
    # torch itself runs it: this is what the reader is for.
    with pytest.raises(BaseException, match="metadata"):
        dcp.load({"epoch": 0}, checkpoint_id=saved)
    assert set(FIRED) == {"an old pickle"}
    FIRED.clear()


@pytest.mark.parametrize("key", ["epoch", "optimizer", "model.weight"])
def test_nothing_in_the_data_is_run(saved: Path, key: str) -> None:
    (file,) = saved.glob("*.distcp")
    index = saved / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    start = file.stat().st_size
    bomb = io.BytesIO()
    torch.save(Bomb(key), bomb)
    with file.open("ab") as stream:
        stream.write(bomb.getvalue())
    for place, info in metadata.storage_data.items():
        if place.fqn == key:
            info.offset, info.length = start, len(bomb.getvalue())
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="cannot be loaded"):
        load(saved, also={"epoch": 0})
    assert FIRED == []


def test_pickles_are_read_as_data() -> None:
    plain = {"a": (1, 2.5, "x"), "b": [None, True, -(2**40)]}
    assert read_pickle(pickle.dumps(plain, 4)) == plain
    for wrong in (b"", b"\x80\x04", b"no pickle", pickle.dumps(plain)[:-3]):
        with pytest.raises(NotPlain):
            read_pickle(wrong)
    # A memo of 2**31 entries: pickle.load would reserve that memory.
    with pytest.raises(NotPlain, match="LONG_BINPUT"):
        read_pickle(b"\x80\x02]r\xff\xff\xff\x7f.")
    with pytest.raises(NotPlain):
        read_pickle(b"\x80\x04cos\nsystem\n\x8c\x04true\x85R.")


def test_files_elsewhere_are_not_read(saved: Path) -> None:
    index = saved / ".metadata"
    whole = index.read_bytes()
    metadata = pickle.loads(whole)
    for change, said in [
        ({"relative_path": "../other"}, "which lies elsewhere"),
        ({"relative_path": "/etc/passwd"}, "which lies elsewhere"),
        ({"relative_path": "missing"}, "No such file"),
        ({"length": 10**9}, "ends before"),
        ({"offset": -1}, "where a size is needed"),
        ({"transform_descriptors": ["zlib"]}, "transformed"),
    ]:
        info = next(iter(metadata.storage_data.values()))
        kept = dict(vars(info))
        vars(info).update(change)
        index.write_bytes(pickle.dumps(metadata))
        vars(info).clear()
        vars(info).update(kept)
        with pytest.raises(ValueError, match=said):
            load(saved)
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(ValueError, match="is no regular file"):
        load(saved)
    index.unlink()
    index.write_bytes(whole)
    (file,) = saved.glob("*.distcp")
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ValueError, match="is no regular file"):
        load(saved)
    with pytest.raises(ValueError, match="is no directory"):
        load(saved / "nothing")


def test_pieces_that_do_not_make_up_a_tensor_are_refused(saved: Path) -> None:
    index = saved / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    size = torch.Size
    for chunks, said in [
        ([((0, 0), (4, 2))], "do not make up"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 1))], "overlap"),
        ([((0, 1), (4, 3))], "lies outside"),
    ]:
        stored = metadata.state_dict_metadata["model.weight"]
        kind = type(stored.chunks[0])
        stored.chunks = [kind(size(at), size(n)) for at, n in chunks]
        index.write_bytes(pickle.dumps(metadata))
        with pytest.raises(ValueError, match=said):
            load(saved)


def test_what_does_not_fit_is_refused_and_nothing_written(saved: Path) -> None:
    class Other(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.extra = nn.Parameter(torch.zeros(1))

    other = Other()
    before = other.weight.detach().clone()
    with pytest.raises(ValueError, match=r"missing \['model.extra'\]"):
        load_sharded_state_dict(other, saved)
    with pytest.raises(ValueError, match=r"left over \['model.bias'\]"):
        load_sharded_state_dict(nn.Linear(3, 4, bias=False), saved)
    with pytest.raises(ValueError, match=r"'model.weight' is \[4, 3\] in the checkpoint"):
        load_sharded_state_dict(nn.Linear(3, 5), saved)
    module = nn.Linear(3, 4)
    module.weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.int), requires_grad=False)
    with pytest.raises(ValueError, match=r"is torch.float32 in the checkpoint, but"):
        load_sharded_state_dict(module, saved)
    with pytest.raises(ValueError, match="is of the optimizer AdamW, but this is SGD"):
        load(saved, lambda p: torch.optim.SGD(p, lr=1.0))
    with pytest.raises(ValueError, match="only one of the optimizer"):
        load(saved, lambda p: torch.optim.AdamW(list(p)[:1]))
    with pytest.raises(ValueError, match="Missing key in checkpoint state_dict: more"):
        load(saved, also={"more": 1})
    other_module = nn.Linear(3, 4)
    with pytest.raises(ValueError, match="that the module does not have"):
        sharded_state_dict(nn.Linear(3, 4), torch.optim.AdamW(other_module.parameters()))
    assert torch.equal(other.weight, before)
    module = nn.Linear(3, 4)
    dcp.save(sharded_state_dict(module), checkpoint_id=saved / "no optimizer")
    with pytest.raises(ValueError, match="it has no optimizer in it"):
        load(saved / "no optimizer")


def test_options_of_groups_go_by_name(tmp_path: Path) -> None:
    module = nn.Linear(3, 4)
    groups: Any = [
        {"params": [module.bias], "lr": torch.tensor(0.5), "betas": (0.5, 0.25)},
        {"params": [module.weight], "lr": 0.125},
    ]
    stepped(module, first := torch.optim.AdamW(groups, foreach=False))
    dcp.save(sharded_state_dict(module, first), checkpoint_id=tmp_path)
    other = nn.Linear(3, 4)
    second = torch.optim.AdamW([{"params": [other.weight]}, {"params": [other.bias]}])
    load_sharded_state_dict(other, tmp_path, second)
    weight, bias = second.param_groups
    assert weight["lr"] == 0.125 and bias["betas"] == (0.5, 0.25)
    assert torch.equal(bias["lr"], torch.tensor(0.5))
    with pytest.raises(ValueError, match="had different options when they were saved"):
        load_sharded_state_dict(other, tmp_path, torch.optim.AdamW(other.parameters()))


class Rows(torch.optim.Optimizer):
    """Keeps a sum of each row, as Adafactor does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["rows"] = p.grad.sum(-1)


def kept_rows(types: dict[str, Any], directory: Path) -> None:
    module = nn.Linear(3, 4, bias=False)
    nn.init.ones_(module.weight)
    declare(module, {"weight": types})
    with set_current_mesh(device_mesh()):
        optimizer = stepped(module, Rows(module.parameters()))
        dcp.save(sharded_state_dict(module, optimizer), checkpoint_id=directory)
        optimizer.state.clear()
        load_sharded_state_dict(module, directory, optimizer)
    assert optimizer.state[module.weight]["rows"].tolist() == [3.0] * 4


def test_state_of_another_shape_needs_a_whole_parameter(tmp_path: Path) -> None:
    run_ranks({"tp": 2}, kept_rows, {"tp": R}, tmp_path, backend="gloo")
    with pytest.raises(RankFailure, match="keeps 'rows' of 'weight' in the shape"):
        run_ranks({"tp": 2}, kept_rows, {"tp": S(0)}, tmp_path / "cut", backend="gloo")


def behind(how: str) -> None:
    module = nn.Linear(3, 4, bias=False)
    declare(module, {"weight": {"tp": P if how == "partial" else S(0)}})
    optimizer = torch.optim.AdamW(module.parameters())
    if how != "partial" and device_mesh().get_rank() == 0:
        stepped(module, optimizer)
    if how == "step":
        stepped(module, optimizer)
    with set_current_mesh(device_mesh()):
        sharded_state_dict(module, optimizer)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("none", r"'optimizer\S*' is not alike on ranks 0 and 1"),
        ("step", r"'optimizer.step.weight' is not alike on ranks 0 and 1"),
        ("partial", "'weight' is Partial on axis 'tp'"),
    ],
)
def test_what_is_no_global_value_is_refused(how: str, said: str) -> None:
    with pytest.raises(RankFailure, match=said):
        run_ranks({"tp": 2}, behind, how)


def test_a_mesh_of_sizes_has_nobody_to_write() -> None:
    module = nn.Linear(3, 4, bias=False)
    declare(module, {"weight": {"tp": S(0)}})
    with (
        set_current_mesh({"tp": 2}),
        pytest.raises(ValueError, match="is a mesh of sizes alone"),
    ):
        sharded_state_dict(module)


def test_a_view_is_only_for_checkpoints() -> None:
    from placements._torch import GlobalView

    view = GlobalView((4, 3), torch.zeros(2, 3), [])
    with pytest.raises(TypeError, match="stands for a global tensor in a checkpoint"):
        view.sum()
    assert isinstance(view.clone(), GlobalView) and isinstance(view, Tensor)
