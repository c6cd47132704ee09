"""Errors that end a training run."""

EXIT_STOPPED = 143  # 128 and the number of SIGTERM, as a shell has it


class RunError(Exception):
    """Says everything in one line, which is printed without a traceback."""


class Unusable(RunError):  # noqa: N818 - what was given, not what went wrong here
    """Says that input cannot be used, and what to do instead."""


class Damaged(Unusable):
    """Says that a checkpoint is not what was written; the one before may be."""


class RankFailed(RunError):  # noqa: N818 - says which rank and why
    """Says which rank ended early, and why."""


class Stopped(RunError):  # noqa: N818 - what happened, and no error
    """Says that the run was asked to end, and did, after a step."""


class LossesDiffer(RunError):  # noqa: N818 - a finding, not a failure of the program
    """Says that the losses of the mesh and of one device are not found to be equal."""
