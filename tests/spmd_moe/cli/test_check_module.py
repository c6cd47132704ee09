"""`spmd-moe check --module`: a typed module of one's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spmd_moe.checks.module.inputs import own_module
from spmd_moe.cli.main import main

ROOT = Path(__file__).parents[3]


def run(name: str, *more: str) -> int:
    return main(["check", "--module", f"tests.support.own_modules.{name}", *more])


def test_a_right_module_passes_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("MLPWithReference") == 0
    out = capsys.readouterr().out
    for text in (
        "dp:R|P tp:S(1)",
        "<- all-reduce tp 96 B",
        "adjoint",
        "those of one device",
    ):
        assert text in out, text


def test_without_a_reference_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("MLP", "--mesh", "tp=4") == 0
    out = capsys.readouterr().out
    assert "on tp=4" in out and "reference:  none" in out


def test_json_says_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("MLPWithReference", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["report"] == "module" and report["passed"]
    assert report["mesh"] == {"dp": 2, "tp": 2}
    assert report["checked"] == ["types", "values", "gradients", "reference"]
    x = next(row for row in report["crossings"] if row["name"] == "x_TD")
    assert (x["global_shape"], x["local_shape"]) == ([6, 4], [3, 4])
    roles = {row["name"]: row["role"] for row in report["crossings"]}
    assert roles["w_DF"] == roles["v_FD"] == "parameter" and roles["x_TD"] == "argument"


def test_a_reference_that_differs_is_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("WrongReference") == 1
    err = capsys.readouterr().err
    assert "result 0 is not that of one device" in err and "at index (" in err
    assert "tensor(" not in err, "whole tensors are printed"


def test_what_is_refused_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ForgotConvert") == 1
    err = capsys.readouterr().err
    assert "x_TD is Invariant on axis 'tp', expected Replicate" in err
    assert "Traceback" not in err


WITHOUT_HYPOTHESIS = """
import sys
sys.modules["hypothesis"] = sys.modules["pytest"] = None  # importing them fails
from spmd_moe.cli.main import main
assert main(["check", "--mesh", "tp=2,sp=on"]) == 0
assert main(["check", "--module", "tests.support.own_modules.MLPWithReference"]) == 0
"""


def test_the_extra_for_testing_is_not_needed() -> None:
    command = [sys.executable, "-c", WITHOUT_HYPOTHESIS]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NeedsNumber", "argument 'scale' is no annotated tensor"),
        ("HasUndeclared", "parameter 'inner.weight' has no declared type"),
        ("LeavesOutAnAxis", "parameter 'w_D' is not declared on mesh axis 'dp'"),
        ("TakesVarying", "argument 'x_TD' is Varying on 'ep'"),
        ("ForgotReduction", "forward does not say what it returns"),
        ("SaysTensorAlone", "forward returns Tensor without On(...); write -> Annotated["),
        ("LeavesTheResultOpen", "does not say what it returns on mesh axis 'tp'"),
        ("NotTyped", "put @typed on NotTyped"),
        ("ReturnsTuple", "forward returns Pair without On(...)"),
        ("UnannotatedArgument", "argument 'mask_TD' is no annotated tensor"),
        ("NeedsFloat32", "x_TD must be float32"),
        ("MLP --mesh tp=32", "at most 16 are simulated"),
    ],
)
def test_what_cannot_be_fed_is_one_line(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*name.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err


def test_dicts_integers_and_positional_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("ManyResults", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checked"] == ["types", "values", "gradients", "reference"]
    ids, _ = own_module("tests.support.own_modules.ManyResults", {"tp": 2}).inputs["ids_T"]
    assert ids.dtype == torch.int64 and set(ids.tolist()) == {0, 1}


def test_what_has_no_gradients_is_not_said_to_have_right_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("WithoutGradients", "--json") == 0
    assert json.loads(capsys.readouterr().out)["checked"] == ["types", "values"]


def test_a_class_inside_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("Outer.Inner") == 0
    assert "own_modules.Outer.Inner on tp=2" in capsys.readouterr().out


def test_what_is_being_checked_is_shown_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("MLP") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("MLP") == 0
    assert "checking" in capsys.readouterr().err
