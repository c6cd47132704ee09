"""Write the page whole or not at all, and find out before the work if it can be written."""

import os
import tempfile
from pathlib import Path

from spmd_moe.checks.errors import BadInput


def check_page(path: Path) -> None:
    """Raise BadInput if no page can be written to `path`."""
    if path.is_dir():
        raise BadInput(f"--html {path}: that is a directory; name a file in it")
    if path.exists() and not path.is_file():
        raise BadInput(f"--html {path}: that is no regular file; name another")
    if not path.parent.is_dir():
        raise BadInput(f"--html {path}: there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise BadInput(
            f"--html {path}: nothing can be written in {path.parent}; name another place"
        )


def write_page(path: Path, page: str) -> None:
    """Write beside `path` first, so that a reader finds the old page or the new one."""
    target = path.resolve()  # what a link leads to is written, not the link
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
    ) as file:
        try:
            file.write(page)
            file.close()
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(file.name, 0o666 & ~umask)
            os.replace(file.name, target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
