"""Saved on one mesh, continued on another, with the losses of a run never interrupted."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from placements.testing import run_ranks
from spmd_moe import Parallel
from spmd_moe.cli.degrees import parse_parallel
from spmd_moe.training import checkpoints, manifest
from spmd_moe.training.errors import Unusable
from spmd_moe.training.recipe import Recipe
from spmd_moe.training.trainer import Trainer, one_device
from spmd_moe.training.world import meshes_of

RECIPE = Recipe(
    layers=1, dim=8, heads=4, hidden_dim=8, num_experts=4, seq_len=7, batch=4, lr=0.03
)
SAVED, STEPS = 3, 6


def saved(mesh: str, directory: Path) -> list[float]:
    trainer = Trainer(RECIPE, parse_parallel(mesh), *meshes_of(parse_parallel(mesh)))
    losses = [trainer.step(step, nullcontext()) for step in range(1, SAVED + 1)]
    checkpoints.save(trainer, directory, SAVED, mesh=mesh, keep=1)
    return losses


def resumed(mesh: str, path: Path) -> list[float]:
    trainer = Trainer(RECIPE, parse_parallel(mesh), *meshes_of(parse_parallel(mesh)))
    checkpoints.load(trainer, path)
    return [trainer.step(step, nullcontext()) for step in range(SAVED + 1, STEPS + 1)]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    twin = one_device(RECIPE)
    return [twin.step(step, nullcontext()) for step in range(1, STEPS + 1)]


def on(mesh: str) -> Parallel:
    return parse_parallel(mesh)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dp=2,ep=2", "dp=2,tp=2,ep=4,sp=on"),
        ("dp=2,tp=2,ep=2,etp=2", "cp=2"),
        ("cp=2,tp=2,ep=4,sp=on", "dp=2"),
    ],
)
def test_a_run_continues_on_another_mesh(
    before: str, after: str, tmp_path: Path, expected: list[float]
) -> None:
    for losses in run_ranks(on(before).num_ranks, saved, before, tmp_path, backend="gloo"):
        assert losses == pytest.approx(expected[:SAVED], rel=1e-10)
    (path,) = manifest.checkpoints_in(tmp_path)
    assert manifest.read(path).mesh == before
    for losses in run_ranks(on(after).num_ranks, resumed, after, path, backend="gloo"):
        assert losses == pytest.approx(expected[SAVED:], rel=1e-10)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    run_ranks(2, saved, "tp=2,ep=2,sp=on", directory, backend="gloo")
    (path,) = manifest.checkpoints_in(directory)
    return path


@pytest.fixture
def written(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / original.name)


def test_shards_are_of_several_ranks_and_load_on_one_device(
    written: Path, expected: list[float]
) -> None:
    assert {"__0_0.distcp", "__1_0.distcp"} <= manifest.read(written).files.keys()
    twin = one_device(RECIPE)
    checkpoints.load(twin, written)
    found = [twin.step(step, nullcontext()) for step in range(SAVED + 1, STEPS + 1)]
    assert found == pytest.approx(expected[SAVED:], rel=1e-10)
    # the bias moved before the checkpoint, so it was saved and loaded
    fresh = one_device(RECIPE).model.get_buffer("blocks.0.moe.router.balance.expert_bias_E")
    bias = twin.model.get_buffer("blocks.0.moe.router.balance.expert_bias_E")
    assert torch.any(bias != fresh)


def test_damage_is_found_and_named(written: Path) -> None:
    shard = written / "__1_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Unusable, match=r"__1_0.distcp has \d+ bytes of \d+; remove"):
        manifest.read(written)
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Unusable, match="is not what was written"):
        manifest.read(written)
    shard.write_bytes(whole)
    (written / ".metadata").unlink()
    with pytest.raises(Unusable, match=r"\.metadata is missing"):
        manifest.read(written)


def test_what_is_no_checkpoint_is_refused(written: Path) -> None:
    file = written / manifest.MANIFEST
    content = json.loads(file.read_text())
    for damaged, said in [
        ("", "cannot be read"),
        ("[1]", "cannot be read"),
        (json.dumps({**content, "format": "other"}), "another program or version"),
        (json.dumps({"format": manifest.FORMAT}), "cannot be read"),
        (json.dumps({**content, "files": {}}), "it has no .metadata"),
        (json.dumps({**content, "files": ["a"]}), "cannot be read"),
        (json.dumps({**content, "text": "other"}), "trained on another text"),
    ]:
        file.write_text(damaged)
        with pytest.raises(Unusable, match=said):
            manifest.read(written)
    file.unlink()
    with pytest.raises(Unusable, match="no checkpoint of spmd-moe train"):
        manifest.read(written)


def test_the_name_and_the_manifest_agree_on_the_step(written: Path) -> None:
    renamed = written.rename(written.with_name("step-00000013"))
    with pytest.raises(Unusable, match="is of step 3: call it step-00000003 again"):
        manifest.read(renamed)


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("step-100000000", "step-00000012", "step-99999999"):
        (tmp_path / name).mkdir()
    steps = [manifest.step_of(path) for path in manifest.checkpoints_in(tmp_path)]
    assert steps == [12, 99_999_999, 100_000_000]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("index", ["of other tensors", "no index"])
def test_a_foreign_checkpoint_is_refused_in_one_line(
    index: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if index == "no index":
        (tmp_path / manifest.INDEX).write_bytes(b"no pickle")
    else:
        one = {"weight": torch.zeros(3)}
        torch.distributed.checkpoint.save(one, checkpoint_id=tmp_path, no_dist=True)
    capfd.readouterr()
    with pytest.raises(Unusable, match="is no checkpoint of this model") as caught:
        checkpoints.load(one_device(RECIPE), tmp_path)
    assert "\n" not in str(caught.value) and capfd.readouterr().err == ""


def test_an_interrupted_save_is_never_taken_for_a_checkpoint(written: Path) -> None:
    directory = written.parent
    left_over = directory / ".unfinished-step-00000009"
    left_over.mkdir()
    (left_over / "__0_0.distcp").write_bytes(b"half")
    assert manifest.checkpoints_in(directory) == [written]
    run_ranks(2, saved_again, directory, backend="gloo")
    names = [path.name for path in manifest.checkpoints_in(directory)]
    assert names == ["step-00000007", "step-00000008"]  # the last two
    assert not left_over.exists()


def saved_again(directory: Path) -> None:
    parallel = Parallel(tp=2)
    trainer = Trainer(RECIPE, parallel, *meshes_of(parallel))
    for step in (6, 7, 8):
        checkpoints.save(trainer, directory, step, mesh="tp=2", keep=2)
