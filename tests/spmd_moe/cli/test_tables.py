"""The tables of `spmd-moe check` on terminals of several widths: nothing is cut."""

import re
from collections import Counter

import pytest
from rich.console import Console

from spmd_moe.cli.main import main

DEEPSEEK = "--preset deepseek-v3 --mesh dp=512,cp=2,tp=8,ep=64"
PROGRAMS = [
    "",
    f"{DEEPSEEK} --all-tables",
    "--preset qwen3-moe --compare-meshes --ranks 4",
    "--module tests.support.own_modules.MLPWithReference",
]
NUMBERS = re.compile(
    r"[\d.]+ (?:B|[KMGT]iB)\b(?:/\d)?"  # bytes
    r"|\d+(?:x\d+)+"  # shapes
    r"|\de-\d\d"  # differences
    r"|\b\w+:[A-Z](?:\(\d\))?(?:\|[-A-Z])?"  # types
)


def shown(
    program: str,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    console = Console(width=width)
    monkeypatch.setattr("spmd_moe.cli.main.make_console", lambda: console)
    assert main(["check", *program.split()]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_number_is_there_whatever_the_width(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = shown(program, 300, monkeypatch, capsys)
    numbers = Counter(NUMBERS.findall(wide))
    assert len(numbers) > 5
    for width in (100, 80):
        out = shown(program, width, monkeypatch, capsys)
        assert max(map(len, out.splitlines())) <= width
        assert "\u2026" not in out
        assert Counter(NUMBERS.findall(out)) == numbers
    narrow = shown(program, 40, monkeypatch, capsys)  # the terminal itself wraps there
    assert Counter(NUMBERS.findall(narrow)) == numbers


def test_numbers_are_aligned_to_the_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shown("--compare-meshes --ranks 16", 100, monkeypatch, capsys)
    lines = out.splitlines()
    start = next(k for k, line in enumerate(lines) if re.match(r" +dp +tp ", line))
    end = lines[start].index("dp") + 2
    rows = [line for line in lines[start + 2 :] if re.match(r" +\d+ ", line)]
    assert len(rows) > 10 and {len(row[:end].split()[0]) for row in rows} == {1, 2}
    assert all(row[end - 1].isdigit() and row[end] == " " for row in rows)
