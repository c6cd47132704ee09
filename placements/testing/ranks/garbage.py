"""What the program held before the ranks began is set aside while they run.

Ranks that are threads share Python's search for garbage. They make many objects that all
live until the step ends, and so make Python search everything again and again: the modules
that were imported, too, which are most of it and are no garbage of the ranks.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def set_aside() -> Generator[None]:
    """Let Python look for garbage meanwhile only among what is made in the block.

    What a program has set aside by itself stays as it is.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.collect(1)  # what is young is judged first, as it would be without this
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
