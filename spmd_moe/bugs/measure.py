"""Run a bug's programs and say what refused the wrong one; nothing is taken on trust.

The wrong program is tried under `typecheck()`, then under `verify()`, then by the kit; the
first that refuses is the answer. The right one must pass both modes and equal one device.
An exception that none of them promises is a crash of ours, and no refusal.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from placements import (
    BranchWarning,
    Mesh,
    PlacementError,
    join,
    set_current_mesh,
    typecheck,
    verify,
)
from placements.testing import device_mesh, run_ranks
from placements.testing.compare.one_device import check_value
from placements.testing.ranks.crashes import CheckerCrash, cause_of, crash_of, is_verdict
from spmd_moe.bugs.record import KIT, TYPES, VERIFY, Bug

NOBODY = "nobody"
CRASHED = "nobody, it crashed"  # the checker did: nothing is known of the program


@dataclass(frozen=True)
class Measurement:
    """Who refused the wrong program, with which error, and whether the right one passed."""

    by: str
    error: BaseException | None
    right_failed: BaseException | None

    @property
    def crash(self) -> CheckerCrash | None:
        """The failure of our checker that left the bug, or its mended program, unjudged."""
        for error in (self.error, self.right_failed):
            if isinstance(error, CheckerCrash):
                return error
        return None

    def is_as(self, bug: Bug) -> bool:
        """Return whether the bug was refused as its entry says, and its mend passed."""
        if self.right_failed is not None:
            return False
        if bug.refused is None or self.error is None:
            return bug.refused is None and self.by == NOBODY
        return self.by == bug.refused.by and bug.refused.fits(self.error)

    @property
    def headline(self) -> str:
        """The first line of the error, without the place in the file."""
        if self.error is None:
            return ""
        line = str(self.error).strip().partition("\n")[0] or type(self.error).__name__
        return re.sub(r" at [\w./<>-]+:\d+", "", line)


def measure(bug: Bug) -> Measurement:
    """Try both programs of a bug."""
    by, error = refusal_of(bug)
    return Measurement(by, error, failure_of(bug))


def refusal_of(bug: Bug) -> tuple[str, BaseException | None]:
    """Return what refuses the wrong program first, and its error."""
    wrong = bug.program("wrong")
    if wrong is None:
        return NOBODY, None
    for mode, by in ((typecheck, TYPES), (verify, VERIFY)):
        error = error_under(mode, bug, wrong)
        if isinstance(error, CheckerCrash):
            return CRASHED, error
        if error is not None:
            return by if isinstance(error, PlacementError) else KIT, error
    kit = bug.program("kit")
    error = _error_of(kit or (lambda: _compare(bug, wrong)), AssertionError)
    if isinstance(error, CheckerCrash):
        return CRASHED, error
    return (NOBODY, None) if error is None else (KIT, error)


def failure_of(bug: Bug) -> BaseException | None:
    """Return what is wrong with the right program; None if it passes, as it must."""
    right = bug.program("right")
    assert right is not None
    for mode in (typecheck, verify):
        error = error_under(mode, bug, right)
        if error is not None:
            return error
    return _error_of(lambda: _compare(bug, right), AssertionError, ValueError)


def error_under(
    mode: Callable[[], Any], bug: Bug, program: Callable[[], Any]
) -> BaseException | None:
    """Return the first cause if a program fails under `typecheck` or `verify`.

    The cause is a PlacementError; or a RankFailure, if the ranks fell out of step, which
    the simulator found; or a CheckerCrash for everything else.
    """
    return _error_of(lambda: run_ranks(dict(bug.mesh), _on_rank, mode, program))


def _error_of(
    run: Callable[[], Any], *promised: type[BaseException]
) -> BaseException | None:
    try:
        with warnings.catch_warnings():
            # That ranks took different branches is a note, and no verdict.
            warnings.simplefilter("ignore", BranchWarning)
            run()
    except Exception as error:
        # A comparison is made here, not on a rank: what a rank asserts is no verdict.
        is_own = isinstance(error, promised)
        return cause_of(error) if is_own or is_verdict(error) else crash_of(error)
    return None


def _on_rank(mode: Callable[[], Any], program: Callable[[], Any]) -> dict[str, Tensor]:
    with set_current_mesh(device_mesh()), mode():
        found: Mapping[str, Tensor] | None = program()
        return {name: x.detach().clone() for name, x in (found or {}).items()}


def _compare(bug: Bug, program: Callable[[], Any]) -> None:
    """Raise AssertionError unless the program's results equal those of one device."""
    by_rank = run_ranks(dict(bug.mesh), _on_rank, typecheck, program)
    one_device: Any = bug.program("one_device")
    expected: dict[str, Tensor] = one_device()
    assert set(by_rank[0]) == set(expected) == set(bug.results), (
        f"{bug.id}: results {sorted(by_rank[0])}, one device {sorted(expected)}, "
        f"types {sorted(bug.results)}"
    )
    for name, types in bug.results.items():
        found = join([results[name] for results in by_rank], types, Mesh(bug.mesh))
        check_value(name, found, expected[name])
