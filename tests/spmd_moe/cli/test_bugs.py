"""`spmd-moe bugs`: the table, one bug whole, JSON, bad input."""

import json
import time

import pytest

from spmd_moe.bugs.catalogue import BUGS
from spmd_moe.bugs.findings import find_all, markdown, summary
from spmd_moe.cli.main import main


def test_both_programs_and_the_whole_error_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bugs", "--show", "b01"]) == 0
    shown = capsys.readouterr().out
    assert "def wrong()" in shown and "def right()" in shown
    assert "refused by types" in shown and "fix       convert(scores_T1" in shown


def test_an_unknown_bug_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bugs", "--show", "B99"]) == 2
    assert capsys.readouterr().err.startswith("spmd-moe bugs: --show B99: no such bug")


def test_json_says_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.perf_counter()
    assert main(["bugs", "--json"]) == 0
    assert time.perf_counter() - started < 60
    found = json.loads(capsys.readouterr().out)
    assert [one["id"] for one in found] == [bug.id for bug in BUGS]
    assert all(one["right_program_passes"] for one in found)


def test_the_sum_counts_every_bug() -> None:
    findings = find_all(BUGS[:2])
    assert summary(findings)[0].startswith("2 of 2 bugs are refused: 2 by types")
    assert all(bug.id in markdown(findings) for bug in BUGS[:2])
