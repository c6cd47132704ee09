"""The pages build into a site; a broken link, a lost anchor or a page left out fails."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
ROOT = Path(__file__).parents[1]
TOP = ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")


def copied(where: Path) -> Path:
    """Copy what the site is made of, since a test changes it."""
    shutil.copytree(ROOT / "docs", where / "docs")
    for name in TOP:
        shutil.copy(ROOT / name, where)
    return where


def build(where: Path) -> subprocess.CompletedProcess[str]:
    config = where / "docs" / "site" / "mkdocs.yml"
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", config],
        capture_output=True, text=True,
    )  # fmt: skip


def test_the_site_builds(tmp_path: Path) -> None:
    made = build(copied(tmp_path))
    assert made.returncode == 0, made.stderr
    site = tmp_path / "build" / "site"
    assert 'href="SECURITY.html"' in (site / "checkpoints.html").read_text()
    assert "placement" in (site / "search" / "search_index.json").read_text()
    # A reader without a network sees all of it.
    assert 'href="site/wide.css"' in (site / "layouts.html").read_text()
    assert (site / "site" / "wide.css").exists()
    pages = "".join(page.read_text() for page in site.rglob("*.html"))
    assert 'src="http' not in pages and '<link href="http' not in pages


PLANTED = {
    "a link to no page": "See [there](nowhere.md).",
    "an anchor that is gone": "See [there](types.md#nowhere).",
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_broken_page_fails(what: str, tmp_path: Path) -> None:
    page = copied(tmp_path) / "docs" / "errors.md"
    page.write_text(f"{page.read_text()}\n{PLANTED[what]}\n")
    made = build(tmp_path)
    assert made.returncode != 0 and "errors.md" in made.stderr


def test_a_page_that_the_menu_lacks_fails(tmp_path: Path) -> None:
    (copied(tmp_path) / "docs" / "new.md").write_text("# New\n")
    made = build(tmp_path)
    assert made.returncode != 0 and "new.md" in made.stderr
