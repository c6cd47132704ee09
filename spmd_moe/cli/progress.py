"""What is being done, on the terminal of stderr, so that stdout has the result alone."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")


def progress(items: Iterable[T], what: str, total: int) -> Iterator[T]:
    """The items, with `what` and how many are done shown while each is worked on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield from items
        return
    with console.status(what) as status:
        for done, item in enumerate(items):
            status.update(f"{what}: {done} of {total} done")
            yield item
