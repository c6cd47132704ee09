"""The error for input that cannot be used."""


class BadInput(Exception):  # noqa: N818 - what the user gave, not what went wrong here
    """Says in one line what is wrong with the input and what to do; exit code 2."""
