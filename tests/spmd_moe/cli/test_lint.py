"""`spmd-moe lint`: what it prints, what it exits with, and what it says to bad input."""

import json
from pathlib import Path

import pytest

from spmd_moe.cli.main import main

HEAD = "from torch.distributed.tensor import DTensor, Shard\n"
CUT = f"{HEAD}x = DTensor.from_local(y, mesh, [Shard(0)])\n"
SUMMED = "import torch.distributed as dist\ndist.all_reduce(p.grad, op=dist.ReduceOp.AVG)\n"


def lint(*arguments: str | Path) -> int:
    return main(["lint", *map(str, arguments)])


def test_nothing_found_is_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    assert lint(tmp_path) == 0
    assert capsys.readouterr().out == "0 findings in 1 files.\n"


def test_a_finding_has_its_place_reason_replacements_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(CUT)
    (tmp_path / "test_a.py").write_text(CUT)
    assert lint(tmp_path) == 1
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"{tmp_path}/a.py:2:5: from-local (look)"
    assert lines[1] == "x = DTensor.from_local(y, mesh, [Shard(0)])"
    assert [line.split()[0] for line in lines[2:6]] == [
        "why", "placements", "spmd_types", "page",
    ]  # fmt: skip
    assert lines[6] == "1 findings in 1 files: 1 look; 1 files of tests left out (--tests)."
    assert lint(tmp_path, "--tests") == 1
    assert "2 findings in 2 files" in capsys.readouterr().out


def test_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(CUT)
    (tmp_path / "b.py").write_text(f"{HEAD}x = from_local(\n")
    assert lint(tmp_path, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["version"], report["report"], report["passed"]) == (1, "lint", False)
    (one,) = report["findings"]
    assert (one["line"], one["column"], one["rule"]) == (2, 5, "from-local")
    (unread,) = report["unread"]
    assert unread["path"].endswith("b.py") and "does not parse" in unread["why"]


def test_github_gets_escaped_annotations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a,b.py").write_text(f"{CUT}{SUMMED}")
    monkeypatch.chdir(tmp_path)
    assert lint(tmp_path, "--format", "github") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "::notice file=a%2Cb.py,line=2,col=5,endLine=2,title=from-local::DTensor.from_local"
    )
    assert [line.split()[0] for line in lines] == ["::notice", "::warning", "::warning"]


def test_rules_and_sureness_are_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(CUT + SUMMED)
    assert lint(tmp_path, "--rule", "clip,average", "--rule", "save") == 1
    assert "1 findings in 1 files: 1 likely" in capsys.readouterr().out
    assert lint(tmp_path, "--rule", "from-local", "--at-least", "likely") == 0
    assert lint(tmp_path, "--at-least", "likely") == 1
    assert "2 findings" in capsys.readouterr().out


def test_files_that_do_not_parse_do_not_stop_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(f"{HEAD}x = from_local(\n")
    (tmp_path / "b.py").write_text(CUT)
    assert lint(tmp_path) == 1
    said = capsys.readouterr()
    assert "b.py:2:5: from-local" in said.out and "1 files could not be judged" in said.out
    assert "a.py:2: does not parse" in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere: there is no such file; give Python files or folders"),
        (
            ("--rule", "to_local", "."),
            "--rule to_local: no such rule; give one of to-local",
        ),
        ((), "the following arguments are required: PATH"),
        (("--json", "--format", "github", "."), "not allowed with argument"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = lint(*arguments)
    except SystemExit as error:  # of the parser
        code = error.code
    assert code == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("spmd-moe lint: ")
