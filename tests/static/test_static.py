"""Static checkers accept annotated code, and still see through the decorators."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CHECKERS = {
    "mypy": [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--explicit-package-bases",
    ],
    "pyright": [
        sys.executable,
        "-m",
        "pyright",
        "--level",
        "error",
        "--pythonpath",
        sys.executable,
    ],
}


def check(checker: str, file: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHECKERS[checker], f"tests/static/{file}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("checker", list(CHECKERS))
def test_annotated_code_is_clean(checker: str) -> None:
    result = check(checker, "annotated.py")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("checker", list(CHECKERS))
def test_misused_code_is_reported(checker: str) -> None:
    result = check(checker, "misused.py")
    lines = [line for line in result.stdout.splitlines() if "misused.py:" in line]
    assert result.returncode != 0
    for number in (7, 8, 9, 10):
        assert any(f"misused.py:{number}" in line for line in lines), result.stdout
