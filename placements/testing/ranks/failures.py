"""How a failure of ranks is told: the exception, and the user's lines in it.

A line is the innermost one outside this package, installed ones (torch) and Python's
own library, since a collective is called through many frames that the reader did not
write.
"""

import inspect
import os
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

import torch

from placements.runtime.errors import PlacementError

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing") + os.sep
# Where packages are installed; torch may be a checkout somewhere else.
_INSTALLED = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    sysconfig.get_path("purelib") + os.sep,
    sysconfig.get_path("platlib") + os.sep,
)
_STANDARD = (
    os.path.dirname(os.path.abspath(os.__file__)) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<frozen",
    "<eval_with_key",
)


class RankFailure(Exception):  # noqa: N818 (a failure of the ranks, of any kind)
    """The ranks did not all finish together.

    `pending` says, rank by rank, where each one stood: its next collective and the
    line that called it, or "returned", or "raised ...". `rank` and `cause` name the
    first rank that raised, and are None when nothing was raised. `errors` has what each
    rank raised, as far as they are known. `branches` says where checked code of the ranks
    parted by a number that belongs to a mesh axis.
    """

    def __init__(
        self,
        headline: str,
        pending: list[str],
        rank: int | None = None,
        cause: BaseException | None = None,
        errors: Sequence[BaseException] = (),
        branches: Sequence[str] = (),
    ) -> None:
        lines = [f"  rank {r}  {text}" for r, text in enumerate(pending)]
        lines += [f"  branch  {text}" for text in branches]
        super().__init__("\n".join([headline, *lines]))
        self.headline = headline
        self.pending = pending
        self.rank = rank
        self.cause = cause
        self.branches = tuple(branches)
        self.errors = tuple(errors) or ((cause,) if cause is not None else ())
        self.__cause__ = cause


SourceLine = tuple[str, int]


def _distance(line: SourceLine) -> int:
    """Return how far a line is from what the reader wrote; 0 is user code."""
    filename = line[0]
    if filename.startswith(_TESTING):
        return 3
    if filename.startswith(_PACKAGE):
        return 1
    if filename.startswith(_INSTALLED):
        return 2
    return 3 if filename.startswith(_STANDARD) else 0


def innermost_line(lines: Iterable[SourceLine]) -> SourceLine:
    """Return the innermost line of user code; without any, the nearest thing to it."""
    found: SourceLine | None = None
    for line in lines:
        if found is None or _distance(line) < _distance(found):
            found = line
        if _distance(found) == 0:
            break
    return found or ("unknown", 0)


def shown_line(line: SourceLine) -> str:
    return f"{line[0].removeprefix(os.getcwd() + os.sep)}:{line[1]}"


def lines_of(frame: FrameType | None) -> Iterable[SourceLine]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def user_line() -> SourceLine:
    """Return the file and line of the innermost caller that is user code."""
    return innermost_line(lines_of(inspect.currentframe()))


def describe_error(error: BaseException) -> str:
    """Return the text `raised Type: message at file:line` of a rank's exception."""
    walked = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, line) for frame, line in walked]
    where = shown_line(innermost_line(reversed(lines)))
    return f"raised {headline_of(error)}  at {where}"


def told_once(failure: RankFailure) -> str:
    """Return a failure of ranks in which what several ranks raised is said once."""
    rank, cause = failure.rank, failure.cause
    if rank is None or cause is None:
        return str(failure)  # where each rank stood is what there is to say
    alike = [r for r, said in enumerate(failure.pending) if said == failure.pending[rank]]
    # Our own errors say where they are; of any other the line is told.
    text = text_of(cause) if isinstance(cause, PlacementError) else describe_error(cause)
    if len(alike) == len(failure.pending):
        return text
    ranks = ", ".join(f"rank {r}" for r in alike)
    others = [
        f"  rank {r}  {said}" for r, said in enumerate(failure.pending) if r not in alike
    ]
    return "\n".join([f"on {ranks}: {text}", *others])


def headline_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """Return what an exception says; an exception may fail to say anything."""
    try:
        return str(error)
    except BaseException as other:  # whatever it is, the first one is to be reported
        return f"(its text cannot be shown: __str__ raised {type(other).__name__})"
