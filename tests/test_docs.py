"""Generated pages are up to date, code in pages runs, examples run."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from placements import demo, rulebook
from spmd_moe import layouts

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_rules_page_is_generated_from_the_tables() -> None:
    assert (ROOT / "docs" / "rules.md").read_text() == rulebook.markdown(), "run: make docs"


def test_layouts_page_is_generated_from_the_table() -> None:
    assert (ROOT / "docs" / "layouts.md").read_text() == layouts.markdown(), (
        "run: make docs"
    )


def test_the_rules_command_prints_every_op_and_reason() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "placements", "rules", "--markdown"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for page in rulebook.pages():
        for row in page.rows:
            assert all(cell.replace("|", "\\|") in out for cell in row)


def test_readme_shows_the_output_of_the_demo() -> None:
    console = Console(file=io.StringIO(), width=100)
    assert demo.run(console) == 0
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    readme = (ROOT / "README.md").read_text()
    for line in filter(str.strip, shown.splitlines()):
        assert line.rstrip() in readme


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_in_pages_runs(page: Path) -> None:
    """The blocks of a page are one program, run top to bottom."""
    program = "\n".join(code_blocks(page))
    if program:
        exec(compile(program, str(page), "exec"), {"__name__": page.stem})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run_and_are_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 80
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    result = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
