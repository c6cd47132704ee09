"""Every published bug is refused as its entry says, and its right program is right."""

import inspect
import textwrap
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import placements
from placements import PlacementError, typecheck
from spmd_moe.bugs.catalogue import BUGS
from spmd_moe.bugs.measure import NOBODY, error_under, failure_of, refusal_of
from spmd_moe.bugs.record import BY, KINDS, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_wrong_program_is_refused_by_name(bug: Bug) -> None:
    by, error = refusal_of(bug)
    if bug.refused is None:
        assert by == NOBODY
        return
    assert by == bug.refused.by, error
    if isinstance(error, PlacementError):
        assert error.axis == bug.refused.axis, error
        assert bug.refused.name in error.name, error
        assert bug.refused.rule in error.rule, error
    else:
        assert bug.refused.name in str(error), error
        assert bug.refused.rule in str(error), error


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_right_program_passes_and_equals_one_device(bug: Bug) -> None:
    error = failure_of(bug)
    if error is not None:
        raise error


def fixed_name(call: str) -> str:
    """The tensor that a fix is about: the first argument of the innermost call."""
    return call.partition(",")[0].rpartition("(")[2]


def with_fix(program: Callable[[], Any], error: PlacementError, call: str) -> Any:
    """The program with `name = fix` before the line that was refused."""
    lines, first = inspect.getsourcelines(program)
    walked = traceback.walk_tb(error.__traceback__)
    line = next(n for frame, n in walked if frame.f_code is program.__code__)
    refused = lines[line - first]
    indent = refused[: len(refused) - len(refused.lstrip())]
    if call.startswith(error.where.split()[0] + "("):  # in the place of the refused call
        lines[line - first :] = [f"{indent}{call}\n"]
    else:
        steps = [f"{indent}{fixed_name(step)} = {step}\n" for step in call.split("; ")]
        lines[line - first : line - first] = steps
    scope = {**vars(placements), **program.__globals__}
    source = textwrap.dedent("".join(lines))
    exec(source.replace("@staticmethod", "", 1), scope)  # a line of its own stays
    return scope[program.__name__]


FIXED = [bug for bug in BUGS if bug.refused is not None and bug.refused.by == "types"]


@pytest.mark.parametrize("bug", FIXED, ids=lambda bug: bug.id)
def test_every_offered_fix_type_checks(bug: Bug) -> None:
    _, error = refusal_of(bug)
    wrong = bug.program("wrong")
    assert isinstance(error, PlacementError) and wrong is not None
    for fix in error.fixes:
        if fixed_name(fix.call).isidentifier():
            mended = with_fix(wrong, error, fix.call)
            again = error_under(typecheck, bug, mended)
            # What follows may be wrong too, but not this op for the same reason.
            assert again is None or not (
                isinstance(again, PlacementError)
                and again.where.split()[0] == error.where.split()[0]
                and again.rule == error.rule
            ), again


def test_entries_are_well_formed() -> None:
    assert len({bug.id for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        assert bug.kind in KINDS
        assert bug.refused is None or bug.refused.by in BY
        assert bug.program("right") is not None and bug.program("one_device") is not None
        assert (bug.program("wrong") is None) == (bug.refused is None)
