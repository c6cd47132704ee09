"""`spmd-moe train` on one process: runs, resumes, compares; bad input is one line."""

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from spmd_moe.checks.errors import BadInput
from spmd_moe.cli.main import main
from spmd_moe.training import manifest
from spmd_moe.training.losses import read_losses
from spmd_moe.training.trainer import Trainer

SMALL = "--layers 1 --dim 8 --heads 2 --hidden-dim 8 --experts 4 --seq 6 --batch 4".split()


@pytest.fixture(autouse=True)
def in_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_STEP_NUM_TASKS",
    ):
        monkeypatch.delenv(name, raising=False)


def test_a_run_its_files_and_its_continuation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = ["train", *SMALL, "--steps", "6", "--log", "whole.jsonl"]
    assert main([*whole, "--compare", "plot.png", "--verify", "3"]) == 0
    out = capsys.readouterr().out
    assert "largest relative difference 0.0e+00" in out and "every 3 steps (2 times)" in out
    assert max(map(len, out.splitlines())) <= 100 and "\x1b" not in out
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")
    assert all(loss.difference == 0 for loss in read_losses(Path("whole.jsonl")))

    run = ["train", "--checkpoint", "run", "--save-every", "2"]
    assert main([*run, *SMALL, "--steps", "4"]) == 0
    assert sorted(os.listdir("run")) == [
        ".lock", "losses.jsonl", "run.json", "step-00000002", "step-00000004",
    ]  # fmt: skip
    # sizes come from the checkpoint
    assert main([*run, "--resume", "--steps", "6", "--compare"]) == 0
    assert Path("losses.png").is_file()
    found, expected = (
        read_losses(Path("run/losses.jsonl")),
        read_losses(Path("whole.jsonl")),
    )
    assert [loss.step for loss in found] == [1, 2, 3, 4, 5, 6]
    assert [x.loss for x in found] == pytest.approx([x.loss for x in expected], rel=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes_run_too(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *SMALL, "--steps", "2", "--dtype", dtype]) == 0
    assert dtype in capsys.readouterr().out


def test_sigterm_ends_a_run_after_the_step_and_saves_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def asked_in_step_2(trainer: Trainer, number: int, checking: Any) -> float:
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, number, checking)

    monkeypatch.setattr(Trainer, "step", asked_in_step_2)
    before = signal.getsignal(signal.SIGTERM)
    run = ["train", "--checkpoint", "run"]
    assert main([*run, *SMALL, "--steps", "4"]) == 143
    out, err = capsys.readouterr()
    assert "1 to 2" in out and err == (
        "spmd-moe train: stopped by SIGTERM after step 2\n"
        "  continue from run/step-00000002 with --resume\n"
    )
    assert signal.getsignal(signal.SIGTERM) is before
    assert main([*run, "--resume", "--steps", "4"]) == 0
    assert main(["train", *SMALL, "--steps", "4", "--log", "whole.jsonl"]) == 143
    assert "nothing was saved, as there is no --checkpoint" in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "step", step)
    assert main(["train", *SMALL, "--steps", "4", "--log", "whole.jsonl"]) == 0
    assert read_losses(Path("run/losses.jsonl")) == read_losses(Path("whole.jsonl"))


# what is given -> what is said
BAD_INPUT = {
    "--mesh tp=4": "--heads (2) must be divisible by tp (4)",
    "--mesh dp=3": "--batch (4) must be divisible by dp (3)",
    "--mesh dp=8,ep=8 --batch 8": "--experts (4) must be divisible by ep (8)",
    "--mesh tp=2 --hidden-dim 3 --shared-experts 3": "--hidden-dim (3) must be divisible by tp (2)",
    "--mesh tp=2,ep=2 --hidden-dim 3": "--shared-experts * --hidden-dim (3) must be divisible by tp (2)",
    "--mesh tp=2,ep=3": "ep (3) must divide dp * cp * tp (2)",
    "--mesh xp=3": "'xp' is no axis; write it as dp=2",
    "--mesh tp=2 --processes 4": "tp=2 is for 2 (dp * cp * tp) processes, but --processes is 4",
    "--top-k 9": "--top-k (9) must be at most --experts (4)",
    "--dim 9": "--dim (9) must be divisible by --heads (2)",
    "--dtype int8": "--dtype ('int8') must be one of float64, float32, bfloat16",
    "--lr 0": "--lr (0.0) must be a number above 0",
    "--seq 100000": "--seq (100000) must be below",
    "--steps 0": "--steps is 0; give at least 1",
    "--keep 0": "--keep is 0; give at least 1",
    "--verify -1": "--verify is -1; give at least 0",
    "--compile tvm": "--compile tvm: give one of inductor, aot_eager, eager",
    "--timeout 0": "--timeout is 0.0; give seconds",
    "--port 0": "--port is 0; give one from 1 to 65535",
    "--resume": "--resume needs --checkpoint DIR",
    "--resume --checkpoint nothing": "nothing has no complete checkpoint: start without --resume",
    "--checkpoint file/below": "--checkpoint: cannot write in file/below (Not a directory)",
    "--checkpoint file": "--checkpoint: cannot write in file (File exists)",
    "--log /proc/losses.jsonl": "--log: cannot write in /proc",
    "--log .": "--log . is a directory: name a file",
    "--log pipe": "--log pipe is no regular file: remove it or name another",
    "--log /dev/null": "--log /dev/null is no regular file",
    "--log other": "--log other.new is no regular file",
    "--checkpoint of-pipes": "--log of-pipes/losses.jsonl is no regular file",
    "--compare pipe.png": "--compare pipe.png is no regular file",
    "--compare /proc/plot.png": "--compare: cannot write in /proc",
    "--compare plot.pdf": "--compare plot.pdf: the plot is a PNG, so name a file .png",
    "--compare directory.png": "--compare directory.png is a directory: name a file",
}


@pytest.mark.parametrize("given", BAD_INPUT)
def test_bad_input_is_one_line(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    for name in ("directory.png", "of-pipes"):
        Path(name).mkdir()
    for name in ("pipe", "pipe.png", "other.new", "of-pipes/losses.jsonl"):
        os.mkfifo(name)
    arguments = ["train", *SMALL, *given.split()]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("spmd-moe train: ") and err.count("\n") == 1
    assert BAD_INPUT[given] in err
    with pytest.raises(BadInput):
        main([*arguments, "--debug"])
    assert not Path("nothing").exists()


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


def test_checkpoints_that_cannot_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("--checkpoint", "run")
    assert main(["train", *SMALL, *run, "--steps", "2"]) == 0
    last = Path("run/step-00000002")
    recipe = manifest.read(last).recipe
    said = refused(capsys, *run)
    assert "run has a run in it (step-00000002): continue it with --resume" in said
    said = refused(capsys, *run, "--resume", "--steps", "2")
    assert "has 2 steps behind it; give more by --steps" in said
    said = refused(capsys, *run, "--resume", "--dim", "16")
    assert "was trained with --dim 8, not 16: leave the option out" in said
    said = refused(capsys, *run, "--resume", "--mesh", "dp=8,ep=8")
    assert "--experts (4) must be divisible by ep (8)" in said
    moved = last.rename("run/step-00000003")
    said = refused(capsys, *run, "--resume")
    assert "run/step-00000003 is of step 2: call it step-00000002 again" in said
    moved.rename(last)
    log = Path("run/losses.jsonl")
    whole = log.read_bytes()
    for broken in (b"[1]\n", b"\xff\xfe\n"):
        log.write_bytes(broken + whole)
        said = refused(capsys, *run, "--resume")
        assert "losses.jsonl is no log of losses (see line 1); move it away" in said
    log.write_bytes(whole)
    shard = last / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-10])
    said = refused(capsys, *run, "--resume")
    assert "is damaged: __0_0.distcp has" in said and "remove run/step-00000002" in said
    (last / ".metadata").unlink()
    assert ".metadata is missing" in refused(capsys, *run, "--resume")
    (last / "manifest.json").write_text(json.dumps({"format": "other"}))
    assert "another program or version" in refused(capsys, *run, "--resume")
    (last / manifest.INDEX).write_bytes(b"no pickle")  # as if it were of another program
    (last / "manifest.json").unlink()
    manifest.write(last, 2, recipe, "dp=1")
    said = refused(capsys, *run, "--resume")
    assert "run/step-00000002 is no checkpoint of this model" in said
    (last / "manifest.json").unlink()
    assert "it has no manifest.json" in refused(capsys, *run, "--resume")
    last.rename(last.with_name(".unfinished-step-00000002"))
    assert "no complete checkpoint" in refused(capsys, *run, "--resume")


def test_a_damaged_checkpoint_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    run = ("train", "--checkpoint", "run", "--save-every", "2")
    assert main([*run, *SMALL, "--steps", "4"]) == 0
    (Path("run/step-00000004") / manifest.INDEX).write_bytes(b"damaged")
    capsys.readouterr()
    assert main([*run, "--resume", "--steps", "4"]) == 0
    err = capsys.readouterr().err
    assert "run/step-00000004 is damaged: .metadata has 7 bytes of" in err
    assert "resuming from run/step-00000002 instead" in err
    assert manifest.read(Path("run/step-00000004")).step == 4  # written again
    manifest.start_run(Path("run"))  # as if another run were in its place
    said = refused(capsys, *run[1:], "--resume", "--steps", "6")
    assert "run/step-00000004 is of the run" in said


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"--port {port} cannot be used" in refused(capsys, "--port", port)


def test_a_job_of_another_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    said = refused(capsys, "--mesh", "tp=2")  # in a script for sbatch, without srun
    assert "has 4 tasks, which srun starts: srun --ntasks 2 spmd-moe train" in said
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert "processes, but this job has 4" in refused(capsys, "--mesh", "tp=2")
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert main(["train", "--mesh", "tp=2"]) == 2
    assert capsys.readouterr().err == ""  # rank 0 says it
    monkeypatch.setenv("SLURM_PROCID", "x")
    assert "SLURM_PROCID is 'x' in the environment" in refused(capsys)


def test_matplotlib_that_cannot_be_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'spmd-moe[plot]'" in refused(capsys, "--compare")


def test_a_run_that_diverged_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    diverging = ["train", *SMALL, "--steps", "4", "--lr", "1e300", "--log", "log.jsonl"]
    assert main([*diverging, "--compare"]) == 1
    out, err = capsys.readouterr()
    assert "nan, not a number from step 3 on" in out
    assert err.startswith("spmd-moe train: the loss is not a number from step 3 on (on the")
    assert '{"step": 4, "loss": null, "one_device": null}' in Path("log.jsonl").read_text()


def test_the_bar_is_on_the_terminal_of_stderr_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["train", *SMALL, "--steps", "2"]) == 0
    out, err = capsys.readouterr()
    assert "training" in err and "training" not in out and "Trained" in out


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    out = capsys.readouterr().out
    assert "spmd-moe train --mesh dp=2,tp=2,ep=2,sp=on" in out and "torchrun" in out
