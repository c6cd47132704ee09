"""Saved on one mesh, continued on another, with the losses of a run never interrupted."""

import hashlib
import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from placements.testing import run_ranks
from spmd_moe import Parallel
from spmd_moe.cli.degrees import parse_parallel
from spmd_moe.training import checkpoints, manifest
from spmd_moe.training.errors import Damaged, Unusable
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
    run = shutil.copytree(original.parent, tmp_path / "run")
    return run / original.name


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
        ("[1]", "it is no JSON object"),
        ("[" * 100_000, "cannot be read"),
        (json.dumps({"format": manifest.FORMAT}), "another program or version"),
        (json.dumps({**content, "step": 4}), "it is not what was written"),
    ]:
        file.write_text(damaged)
        with pytest.raises(Damaged, match=said):
            manifest.read(written)
    # What a stranger wrote has a digest that fits.
    recipe = content["recipe"]
    for change, said in [
        ({"format": "other"}, "another program or version"),
        ({"files": {}}, "it has no .metadata"),
        ({"files": ["a"]}, "no list of files"),
        ({"files": {"../a": [1, "b"]}}, "names the file '../a'"),
        ({"files": {"a": 1}}, "cannot be read"),
        ({"text": "other"}, "trained on another text"),
        ({"step": "6"}, "its step is '6'"),
        ({"step": 6}, "is of step 6: call it step-00000006 again"),
        ({"run": 7}, "its run is 7"),
        ({"run": "another"}, "is of the run another, but"),
        ({"more": 7}, "it has the entries"),
        ({"recipe": {**recipe, "dim": "8"}}, "its dim is '8'"),
        ({"recipe": {**recipe, "dim": 8.0}}, "its dim is 8.0"),
        ({"recipe": {**recipe, "dim": -8}}, r"dim \(-8\) must be"),
        ({"recipe": {**recipe, "dim": 2**40}}, "says sizes of at least"),
        ({"recipe": {**recipe, "layers": 10**12}}, "says sizes of at least"),
        ({"recipe": {**recipe, "batch": 2**40}}, "says batches of"),
        ({"recipe": [1]}, "it has no recipe"),
    ]:
        seal(file, {**content, **change})
        with pytest.raises(Unusable, match=said):
            manifest.read(written)
    file.unlink()
    with pytest.raises(Unusable, match="no checkpoint of spmd-moe train"):
        manifest.read(written)


def seal(file: Path, content: dict[str, Any]) -> None:
    """Write a manifest whose digest fits."""
    told = {key: value for key, value in content.items() if key != "digest"}
    text = json.dumps(told, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    file.write_text(json.dumps({**told, "digest": digest}))


def test_what_is_no_file_is_damage(written: Path) -> None:
    for name in (manifest.MANIFEST, "__1_0.distcp", manifest.INDEX):
        file = written / name
        whole = file.read_bytes()
        file.unlink()
        os.mkfifo(file)
        with pytest.raises(Damaged, match="is no regular file"):
            manifest.read(written)
        file.unlink()
        file.symlink_to("/dev/zero")
        with pytest.raises(Damaged, match="is no regular file"):
            manifest.read(written)
        file.unlink()
        file.mkdir()
        with pytest.raises(Damaged, match="is no regular file"):
            manifest.read(written)
        file.rmdir()
        file.write_bytes(whole)
    assert manifest.read(written).step == SAVED


def test_a_file_that_cannot_be_read_is_damage(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Path.open

    def unreadable(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "__1_0.distcp":
            raise PermissionError(13, "Permission denied")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", unreadable)
    with pytest.raises(Damaged, match=r"__1_0.distcp cannot be read \(Permission denied\)"):
        manifest.read(written)


def test_a_checkpoint_of_another_run_is_refused(written: Path, tmp_path: Path) -> None:
    manifest.start_run(written.parent)  # so the checkpoint is now that of an earlier one
    with pytest.raises(Unusable, match=r"is of the run [0-9a-f]{16}, but"):
        manifest.read(written)
    run_file = written.parent / manifest.RUN
    run_file.write_text(run_file.read_text().replace('"run"', '"ran"'))
    with pytest.raises(Unusable, match=r"run.json cannot be read"):
        manifest.read(written)
    run_file.unlink()
    assert manifest.read(written).step == SAVED
    other = shutil.copytree(written, written.with_name("step-00000002"))
    content = json.loads((other / manifest.MANIFEST).read_text())
    seal(other / manifest.MANIFEST, {**content, "step": 2, "run": "another"})
    for path in (written, other):
        with pytest.raises(Unusable, match="is of another run than"):
            manifest.read(path)


def test_the_last_one_that_is_whole_is_taken(written: Path) -> None:
    run = written.parent
    for step in (4, 5):
        later = shutil.copytree(written, run / manifest.name_of(step))
        content = json.loads((later / manifest.MANIFEST).read_text())
        seal(later / manifest.MANIFEST, {**content, "step": step})
    (run / "step-00000005" / manifest.INDEX).write_bytes(b"")
    (run / "step-00000004" / manifest.MANIFEST).write_bytes(b"")
    path, found, damaged = manifest.read_last(manifest.checkpoints_in(run))
    assert path == written and found.step == SAVED and len(damaged) == 2
    # Saved again, the damaged ones stand in nobody's way, nor does a link to an old one.
    elsewhere = run.parent / "elsewhere"
    (run / "step-00000001").symlink_to(shutil.copytree(written, elsewhere))
    run_ranks(2, saved_at_four, run, backend="gloo")
    names = [path.name for path in manifest.checkpoints_in(run)]
    assert names == ["step-00000003", "step-00000004"]
    assert (elsewhere / manifest.MANIFEST).exists()
    assert (run / ".damaged-step-00000005").exists()


def saved_at_four(directory: Path) -> None:
    parallel = Parallel(tp=2)
    trainer = Trainer(RECIPE, parallel, *meshes_of(parallel))
    checkpoints.save(trainer, directory, 4, mesh="tp=2", keep=2)


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
    in_the_way = directory / "step-00000008"  # no directory, and a save replaces those
    in_the_way.write_text("")
    assert manifest.checkpoints_in(directory) == [written]
    run_ranks(2, saved_again, directory, backend="gloo")
    names = [path.name for path in manifest.checkpoints_in(directory)]
    assert names == ["step-00000007", "step-00000008"]  # the last two
    assert not left_over.exists() and (directory / ".damaged-step-00000008").is_file()


def saved_again(directory: Path) -> None:
    parallel = Parallel(tp=2)
    trainer = Trainer(RECIPE, parallel, *meshes_of(parallel))
    for step in (6, 7, 8):
        checkpoints.save(trainer, directory, step, mesh="tp=2", keep=2)
