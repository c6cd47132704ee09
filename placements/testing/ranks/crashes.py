"""A crash is no verdict: what a checker may raise, and how all else is told.

A checker judges a program by the exceptions that it promises: ours raises PlacementError.
Any other exception that is raised while a program is being checked has one of two causes.
The program raises it by itself, which shows when it runs without the checker; or the
checker failed, which says nothing of the program. Whoever turns an exception into a
verdict asks here, so that a failure of the checker is never counted as a refusal.
"""

import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any, cast

from placements._torch import UnsupportedTorchError
from placements.runtime.errors import PlacementError
from placements.testing.ranks.failures import RankFailure, headline_of, shown_line
from placements.types.errors import ArgumentError


class CheckerCrash(Exception):  # noqa: N818 (a crash, of any kind)
    """A checker failed, so nothing is known of the program. `cause` is what it raised.

    It is neither an AssertionError nor a ValueError: who expects a wrong program to be
    found by one of those must not take this for it.
    """

    def __init__(self, cause: BaseException, more: str = "") -> None:
        super().__init__(f"{described(cause)}: {DEFECT}{more}")
        self.cause = cause
        self.__cause__ = cause


DEFECT = "this is a defect of placements, not a verdict on the program"


def described(error: BaseException) -> str:
    """Return what was raised and where: `KeyError: 'tp' (checker/call.py:12)`."""
    walked = list(traceback.walk_tb(error.__traceback__))
    if not walked:
        return headline_of(error)
    frame, line = walked[-1]
    return f"{headline_of(error)} ({shown_line((frame.f_code.co_filename, line))})"


def cause_of(error: BaseException) -> BaseException:
    """Return what the first rank raised; the failure if ranks fell out of step."""
    if isinstance(error, RankFailure) and error.cause is not None:
        return error.cause
    return error


def crash_of(error: BaseException, more: str = "") -> CheckerCrash:
    """Return the crash that an error is, or that it tells of.

    UnsupportedTorchError is raised as it is: it is about the installation, and says by
    itself what to do.
    """
    cause = cause_of(error)
    if isinstance(cause, UnsupportedTorchError):
        raise cause
    return cause if isinstance(cause, CheckerCrash) else CheckerCrash(cause, more)


def is_verdict(error: BaseException, *promised: type[BaseException]) -> bool:
    """Return whether an error is what a checker promises to raise, and not a crash.

    A RankFailure without a cause is the simulator's own: the ranks did not meet.
    """
    return isinstance(cause_of(error), (PlacementError, RankFailure, *promised))


def check_judged(error: Exception, plainly: Callable[[], object]) -> None:
    """Raise CheckerCrash unless an error says something of the checked program.

    It does if the checker promises it; if it is an ArgumentError, by which a call refuses
    what the program says to it, though an unchecked call would not look; or if the program
    raises the same by itself. `plainly` runs it without the checker.
    """
    own_error([error], plainly)


def own_error(
    errors: Sequence[Exception], plainly: Callable[[], object]
) -> Exception | None:
    """Return the first error of the ranks that is the fault of their own program.

    None if the checker promises them all, and CheckerCrash as `check_judged` says. Where
    one rank fails by itself, what befalls the others says nothing of the checker.
    """
    unpromised = [error for error in errors if not is_verdict(error)]
    if not unpromised:
        return None
    crashes = [crash_of(error) for error in unpromised]
    for error, crash in zip(unpromised, crashes, strict=True):
        if crash is cause_of(error):
            raise crash
    try:
        plainly()
        raised = set[str]()
    except Exception as own:
        raised = _all_said(own)
    for error, crash in zip(unpromised, crashes, strict=True):
        if isinstance(crash.cause, ArgumentError) or _said(crash.cause) in raised:
            return error
    raise crashes[0]


_ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def _said(error: BaseException) -> str:
    """Return type and message, without addresses, which differ between two runs."""
    return _ADDRESS.sub("0x", headline_of(error))


def _all_said(error: BaseException) -> set[str]:
    """Return what a program raised: it, or its ranks, which need not say the same."""
    if isinstance(error, ExceptionGroup):
        return set[str]().union(*map(_all_said, cast(Any, error).exceptions))
    if isinstance(error, RankFailure):
        return set(map(_said, error.errors))
    return {_said(error)}
