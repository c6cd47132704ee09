"""`spmd-moe check` when something is wrong: exit code 1, told to people and to programs."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from placements import PlacementError
from placements.testing import RankFailure
from placements.types.text import parse_axis_type
from spmd_moe import layer
from spmd_moe.checks import configurations, meshes, simulate
from spmd_moe.checks.trace import Workload
from spmd_moe.cli.main import main
from spmd_moe.layouts import layout
from tests.support import own_modules

C4 = ("--mesh", "tp=2,sp=off")


def run(*arguments: str) -> int:
    return main(["check", *arguments])


def numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "reference_moe", lambda x, *_: x * 1.001)


def bytes_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    right = configurations.trace

    def wrong(config: Any, parallel: Any, work: Workload) -> Any:
        return right(config, parallel, replace(work, batch=work.batch + 1))

    monkeypatch.setattr(configurations, "trace", wrong)


def types_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    invariant = {**layout("C4").entered, "tp": parse_axis_type("I")}
    wrong = replace(layout("C4"), entered=invariant, tokens=invariant)
    monkeypatch.setattr(layer, "layout", lambda _: wrong)


def a_rank_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RankFailure("rank 1 raised", ["returned", "raised"])

    monkeypatch.setattr(configurations, "simulate", fail)


def test_numbers_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers_differ(monkeypatch)
    assert run(*C4) == 1
    out = capsys.readouterr().out
    assert "FAILED: C4: numbers differ from those of one device" in out
    assert "sent otherwise" not in out and "Output and gradients are those" not in out
    assert run(*C4, "--json") == 1
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert not check["simulated"]["passed"] and not check["simulated"]["sent_otherwise"]


def test_bytes_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bytes_differ(monkeypatch)
    assert run(*C4) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "FAILED: C4: rank 0 sent otherwise than traced: 1 x all-reduce tp 1920 B" in out
    assert "numbers differ" not in out and "Output and gradients are those" not in out
    assert run(*C4, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    simulated = report["checks"][0]["simulated"]
    assert not report["passed"] and not simulated["passed"]
    assert simulated["sent_otherwise"] == [
        "1 x all-reduce tp 1920 B traced, not sent",
        "1 x all-reduce tp 1920 B in backward traced, not sent",
        "1 x all-reduce tp 1280 B sent, not traced",
        "1 x all-reduce tp 1280 B in backward sent, not traced",
    ]


@pytest.mark.parametrize(
    ("break_it", "said", "error"),
    [
        (types_differ, "is Invariant on axis 'tp'", PlacementError),
        (a_rank_fails, "rank 1 raised\n  rank 0  returned", RankFailure),
    ],
)
def test_what_ends_the_check(
    break_it: Callable[[pytest.MonkeyPatch], None],
    said: str,
    error: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(monkeypatch)
    assert run(*C4) == 1
    shown = capsys.readouterr()
    assert said in shown.err and "Traceback" not in shown.err and not shown.out
    assert run(*C4, "--json") == 1
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert said in report["failure"] and report["passed"] is False and not shown.err
    assert (report["version"], report["report"], report["checks"]) == (1, "check", [])
    assert report["model"]["num_experts"] == 8
    with pytest.raises(error):
        run(*C4, "--debug")


def test_meshes_that_do_not_type_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PlacementError("refused")

    monkeypatch.setattr(meshes, "trace", refuse)
    assert run("--compare-meshes", "--ranks", "2", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["report"] == "meshes" and report["meshes"] == []
    assert not report["passed"] and report["failure"] == "refused"


@pytest.mark.parametrize(
    ("name", "said", "checked"),
    [
        ("ForgotConvert", "x_TD is Invariant on axis 'tp'", []),
        ("WrongReference", "is not that of one device", ["types", "values", "gradients"]),
    ],
)
def test_a_module_that_fails(
    name: str, said: str, checked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    module = "tests.support.own_modules."
    assert run("--module", f"{module}MLPWithReference", "--json") == 0
    right = json.loads(capsys.readouterr().out)
    assert right["failure"] is None
    assert run("--module", f"{module}{name}", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"] and said in report["failure"]
    assert report["checked"] == checked and list(report) == list(right)


def test_each_trace_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each configuration as it is asked for, and one as it is run, in float64."""
    calls: list[object] = []
    right = configurations.trace

    def counted(*args: Any) -> Any:
        calls.append(args)
        return right(*args)

    monkeypatch.setattr(configurations, "trace", counted)
    assert run() == 0
    assert len(calls) == len(set(calls)) == 12


OWN = "tests.support.own_modules."


def line_of(name: str) -> str:
    return f"own_modules.py:{getattr(own_modules, name).forward.__wrapped__.__code__.co_firstlineno}"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Unsummed", "the gradient of x_TD is different on ranks 0 and 1 on axis 'tp'"),
        ("HalvedWeight", "the gradient of self.w_DF is not the adjoint"),
    ],
)
def test_a_failing_module_is_told_once_with_the_users_names_and_line(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--module", f"{OWN}{name}") == 1
    err = capsys.readouterr().err
    assert err.count(said) == 1 and line_of(name) in err
    for ours in ("run_own_module.py", "own_module.py:", "rank 0  ", "local", "weight__"):
        assert ours not in err.replace("own_modules.py", ""), err


def test_what_one_rank_raises_is_told_with_the_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--module", f"{OWN}RaisesOnRankOne") != 0
    err = capsys.readouterr().err
    assert err.count("LookupError: no such row") == 1
    assert "on rank 1: " in err and "tests/support/own_modules.py:" in err


def test_sizes_that_contradict_each_other_are_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--module", f"{OWN}TwoSizes") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "argument 'x_TD': dim 'D' is 4 in parameter 'w_DF' but 5 in 'u_D'" in err
