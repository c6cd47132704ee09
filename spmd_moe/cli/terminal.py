"""What commands print on: the console, progress, and the text of a failure."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console

WIDTH = 100  # where there is no terminal to ask, and the most that a table takes
CRASHED = 3  # the exit code if the checker itself failed

T = TypeVar("T")


def make_console() -> Console:
    """Make a console with colours only on a terminal, and a fixed width elsewhere."""
    console = Console()
    if not console.is_terminal or console.width > WIDTH:
        return Console(width=WIDTH)
    return console


@contextmanager
def progress(items: Iterable[T], what: str, total: int) -> Generator[Iterator[T]]:
    """Yield the items, and show `what` and how many are done while each is worked on.

    This is shown on the terminal of stderr, so that stdout has the result alone.
    """
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


def failure_of(error: Exception, *promised: type[Exception]) -> tuple[str, int]:
    """Return what to print of an error that ends a check, and the exit code.

    A verdict is a PlacementError, ranks that fell out of step, or what is `promised`.
    An UnsupportedTorchError, also one of a rank, is raised for `main` to tell.
    """
    from placements.testing import RankFailure
    from placements.testing.ranks.crashes import is_verdict  # imports the simulator: late
    from placements.testing.ranks.failures import told_once

    if not (is_verdict(error) or isinstance(error, promised)):
        return crash_text(error), CRASHED
    if isinstance(error, RankFailure):
        return told_once(error), 1
    return str(error) or repr(error), 1


def crash_text(error: Exception) -> str:
    """Return the line that says that the checker failed, which is no verdict."""
    from placements.testing.ranks.crashes import crash_of

    return f"{crash_of(error)}; --debug shows all"
