"""Python seldom searches the whole program for garbage while ranks run as threads.

They share its search. They make many objects that all live until the step ends, and so make
Python search everything again and again: the modules that were imported, too, which are
most of it and are no garbage of the ranks.
"""

import gc
from collections.abc import Generator
from contextlib import contextmanager

# So many searches of what is young come before one of the whole; Python's own number is 10.
SEARCHES = 1000


@contextmanager
def seldom_searched() -> Generator[None]:
    """Let Python search the whole program a hundred times less often in the block.

    What is young is searched as ever. `gc.freeze` would be no mend: Python counts again,
    after it, what is old, and then searches the whole more often than before.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], max(before[2], SEARCHES))
    try:
        yield
    finally:
        gc.set_threshold(*before)
