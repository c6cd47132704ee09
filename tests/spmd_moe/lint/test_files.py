"""Which files are looked at."""

from pathlib import Path

from spmd_moe.lint.files import python_files


def make(top: Path, *names: str) -> None:
    for name in names:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).touch()


def names(top: Path, *, tests: bool = False) -> list[str]:
    return [f.relative_to(top).as_posix() for f in python_files([top], tests=tests)[0]]


def test_hidden_folders_environments_and_caches_are_left_out(tmp_path: Path) -> None:
    top = tmp_path / ".hidden" / "tests"  # what is above the given folder does not matter
    make(top, "a.py", "b/c.py", "b/c.txt", ".git/x.py", "venv/x.py", "b/__pycache__/x.py",
         "env/pyvenv.cfg", "env/lib/x.py", "node_modules/x.py")  # fmt: skip
    assert names(top) == ["a.py", "b/c.py"]


def test_tests_are_left_out_unless_asked_for_or_named(tmp_path: Path) -> None:
    make(tmp_path, "a.py", "test_a.py", "a_test.py", "conftest.py", "tests/b.py",
         "testing_utils.py", "contest.py")  # fmt: skip
    files, left_out = python_files([tmp_path], tests=False)
    assert [f.name for f in files] == ["a.py", "contest.py"] and left_out == 5
    assert len(names(tmp_path, tests=True)) == 7
    named = tmp_path / "test_a.py"
    assert python_files([named], tests=False) == ([named], 0)


def test_loops_of_links_end_and_files_are_looked_at_once(tmp_path: Path) -> None:
    make(tmp_path, "real/a.py", "real/b.py")
    (tmp_path / "real" / "loop").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to(tmp_path / "real")
    (tmp_path / "lost.py").symlink_to(tmp_path / "gone.py")
    assert sorted(f.name for f in python_files([tmp_path], tests=False)[0]) == [
        "a.py",
        "b.py",
    ]
    twice = [tmp_path / "real", tmp_path / "real" / "a.py"]
    assert len(python_files(twice, tests=False)[0]) == 2
