"""What commands print on, and the error for input that cannot be used."""

from rich.console import Console

WIDTH = 100  # where there is no terminal to ask, and the most that a table takes


class BadInput(Exception):  # noqa: N818 - what the user gave, not what went wrong here
    """One line that says what is wrong with the input and what to do; exit code 2."""


def make_console() -> Console:
    """Colours only on a terminal; a fixed width elsewhere."""
    console = Console()
    if not console.is_terminal or console.width > WIDTH:
        return Console(width=WIDTH)
    return console
