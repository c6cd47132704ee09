"""How a run can end before its time, or not as it should."""


class RunError(Exception):
    """One line that says all: no name of a class, no traceback."""


class Unusable(RunError):  # noqa: N818 - what was given, not what went wrong here
    """What was given cannot be used; says what to do instead."""


class RankFailed(RunError):  # noqa: N818 - says which rank and why
    """A rank ended before its time."""


class LossesDiffer(RunError):  # noqa: N818 - a finding, not a failure of the program
    """The mesh and one device were trained alike, and are not found to be equal."""
