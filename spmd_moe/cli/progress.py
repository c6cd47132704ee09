"""What is being done, on the terminal of stderr, so that stdout has the result alone."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console

T = TypeVar("T")


@contextmanager
def progress(items: Iterable[T], what: str, total: int) -> Generator[Iterator[T]]:
    """The items, with `what` and how many are done shown while each is worked on."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield iter(items)
        return
    with console.status(what) as status:

        def shown() -> Iterator[T]:
            for done, item in enumerate(items):
                status.update(f"{what}: {done} of {total} done")
                yield item

        yield shown()
