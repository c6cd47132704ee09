"""One run in a directory: a lock that ends with the process that holds it."""

import fcntl
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from spmd_moe.training.errors import Unusable

LOCK = ".lock"


@contextmanager
def locked(directory: Path) -> Generator[None]:
    """Nobody else has `directory` meanwhile; Unusable if somebody has it now."""
    with (directory / LOCK).open("a") as file:
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
