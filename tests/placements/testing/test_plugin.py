"""The pytest plugin in somebody else's project."""

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from hypothesis import settings
settings.register_profile("mine", max_examples=7)
settings.load_profile("mine")
"""
TEST = """
from hypothesis import settings
def test_examples(): assert settings().max_examples == {examples}
"""


@pytest.mark.parametrize(
    "options, examples", [([], 7), (["--placements-profile", "dev"], 50)]
)
def test_a_profile_is_set_only_if_one_is_named(
    options: list[str], examples: int, tmp_path: Path
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST.format(examples=examples))
    command = [sys.executable, "-m", "pytest", "-p", "placements.testing.plugin", *options]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout


def test_an_unknown_profile_is_refused(tmp_path: Path) -> None:
    options = ["-p", "placements.testing.plugin", "--placements-profile", "fast"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 4 and "invalid choice: 'fast'" in run.stderr
