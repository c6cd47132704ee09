"""Which files are looked at: Python below the given paths, each once."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_LEFT_OUT = {"__pycache__", "node_modules", "venv"}
_TESTS = {"test", "tests", "testing"}


def python_files(roots: Iterable[Path], *, tests: bool) -> tuple[list[Path], int]:
    """Return the files, and how many files of tests were left out.

    A file that is named is always looked at. Below a folder, hidden folders, virtual
    environments and `__pycache__` are left out, and tests unless they are asked for.
    Links are followed; what is reached twice is looked at once.
    """
    found: dict[str, Path] = {}
    left_out = 0
    for root in roots:
        for file in [root] if root.is_file() else _below(root):
            if not tests and file != root and _is_test(file.relative_to(root)):
                left_out += 1
            else:
                found.setdefault(os.path.realpath(file), file)
    return list(found.values()), left_out


def _below(root: Path) -> Iterator[Path]:
    seen: set[str] = set()
    for top, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(top)
        if real in seen or (top != str(root) and "pyvenv.cfg" in files):
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(
            f for f in folders if not f.startswith(".") and f not in _LEFT_OUT
        )
        for name in sorted(files):
            file = Path(top, name)
            if name.endswith(".py") and file.is_file():
                yield file


def _is_test(file: Path) -> bool:
    words = {"test", "testing", "conftest"} & set(file.stem.split("_"))
    return bool(words) or bool(_TESTS & set(file.parts[:-1]))
