"""Lock the directory of a run until the process that holds the lock ends."""

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from spmd_moe.training.errors import Unusable

LOCK = ".lock"


@contextmanager
def locked(directory: Path) -> Generator[None]:
    """Hold `directory` for this run alone; Unusable if another run holds it."""
    path = directory / LOCK
    if os.path.lexists(path) and not path.is_file():  # a pipe would be waited for
        raise Unusable(f"--checkpoint {directory}: {path} is no file; remove it")
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unusable(
                f"--checkpoint {directory}: another run is using it; wait for its end, or "
                "name another directory"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
