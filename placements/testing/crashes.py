"""A crash is no verdict: what a checker may raise, and how all else is told.

A checker judges a program by the exceptions that it promises: ours raises PlacementError.
Any other exception that is raised while a program is being checked has one of two causes.
The program raises it by itself, which shows when it runs without the checker; or the
checker failed, which says nothing of the program. Whoever turns an exception into a
verdict asks here, so that a failure of the checker is never counted as a refusal.
"""

import dis
import os
import traceback
from collections.abc import Callable

from placements.errors import PlacementError
from placements.testing.failures import RankFailure, headline_of, shown_line


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
    """`KeyError: 'tp' (placements/infer.py:12)`: what was raised, and in which line."""
    walked = list(traceback.walk_tb(error.__traceback__))
    if not walked:
        return headline_of(error)
    frame, line = walked[-1]
    return f"{headline_of(error)} ({shown_line((frame.f_code.co_filename, line))})"


def cause_of(error: BaseException) -> BaseException:
    """What the first rank raised; the failure itself if the ranks fell out of step."""
    if isinstance(error, RankFailure) and error.cause is not None:
        return error.cause
    return error


def crash_of(error: BaseException, more: str = "") -> CheckerCrash:
    """The crash that an error is, or that it tells of."""
    cause = cause_of(error)
    return cause if isinstance(cause, CheckerCrash) else CheckerCrash(cause, more)


def is_verdict(error: BaseException, *promised: type[BaseException]) -> bool:
    """Whether an error is what a checker promises to raise, and not a crash.

    A RankFailure without a cause is the simulator's own: the ranks did not meet.
    """
    return isinstance(cause_of(error), (PlacementError, RankFailure, *promised))


def check_judged(error: Exception, plainly: Callable[[], object]) -> None:
    """CheckerCrash unless an error of a checked program says something of the program.

    It does if the checker promises it, or if the program raises the like by itself:
    `plainly` runs it without the checker. What a call of this package says of bad
    arguments is an error of the program too, though some are looked at only then.
    """
    cause = cause_of(error)
    if isinstance(cause, CheckerCrash):
        raise cause
    if is_verdict(error) or _is_of_arguments(cause):
        return
    try:
        plainly()
    except Exception as own:
        if type(cause_of(own)) is type(cause):
            return
    raise CheckerCrash(cause)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_RAISE = dis.opmap["RAISE_VARARGS"]


def _is_of_arguments(error: BaseException) -> bool:
    """Whether a `raise` statement of this package made it: one that nobody meant comes
    from an operation that failed, as a lookup or an unpacking does."""
    if not isinstance(error, ValueError | TypeError) or error.__traceback__ is None:
        return False
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    code = last.tb_frame.f_code
    return code.co_filename.startswith(_PACKAGE) and code.co_code[last.tb_lasti] == _RAISE
