"""How a failure of ranks is told: the exception, and the user's lines in it.

A line is the innermost one outside torch and this package, since a collective is
called through many frames that the reader did not write.
"""

import inspect
import os
import threading
import traceback
from collections.abc import Iterable
from types import FrameType

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TESTING = os.path.join(_PACKAGE, "testing") + os.sep
_STANDARD = os.path.dirname(os.path.abspath(threading.__file__)) + os.sep
_LIBRARIES = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    _STANDARD + "contextlib.py",
    _STANDARD + "functools.py",
    _STANDARD + "threading.py",
    "<frozen",
    "<eval_with_key",
)


class RankFailure(Exception):  # noqa: N818 (a failure of the ranks, of any kind)
    """The ranks did not all finish together.

    `pending` says, rank by rank, where each one stood: its next collective and the
    line that called it, or "returned", or "raised ...". `rank` and `cause` name the
    first rank that raised, and are None when nothing was raised.
    """

    def __init__(
        self,
        headline: str,
        pending: list[str],
        rank: int | None = None,
        cause: BaseException | None = None,
    ) -> None:
        lines = [f"  rank {r}  {text}" for r, text in enumerate(pending)]
        super().__init__("\n".join([headline, *lines]))
        self.headline = headline
        self.pending = pending
        self.rank = rank
        self.cause = cause
        self.__cause__ = cause


Line = tuple[str, int]


def innermost_line(lines: Iterable[Line]) -> Line:
    # Code of this package is passed over, unless there is nothing else: the laws
    # that ship with it are user code to the simulator.
    fallback = ("unknown", 0)
    for line in lines:
        filename = line[0]
        if filename.startswith(_LIBRARIES):
            continue
        if not filename.startswith(_PACKAGE):
            return line
        if fallback[1] == 0 and not filename.startswith(_TESTING):
            fallback = line
    return fallback


def shown_line(line: Line) -> str:
    return f"{line[0].removeprefix(os.getcwd() + os.sep)}:{line[1]}"


def lines_of(frame: FrameType | None) -> Iterable[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def user_line() -> Line:
    """The file and line of the innermost caller outside torch and this package."""
    return innermost_line(lines_of(inspect.currentframe()))


def describe_error(error: BaseException) -> str:
    """The text `raised Type: message at file:line` of a rank's exception."""
    walked = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, line) for frame, line in walked]
    where = shown_line(innermost_line(reversed(lines)))
    return f"raised {headline_of(error)}  at {where}"


def headline_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
