"""Call forms that are drawn and judged once, and tried again on each mutant of their op.

A form is drawn without a look at the tables, so it is kept together with what the tables
make of it as they are. A mutant is dead at the first form that it judges worse.
"""

import functools
import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from placements.checker import refusals
from placements.testing.forms.form import Form
from placements.testing.forms.judge import Judgement, judge
from placements.testing.forms.report import first_valid, limits
from placements.testing.forms.signatures import signatures


@dataclass(frozen=True)
class Known:
    """A form, and what becomes of it with the tables as they are."""

    number: int
    form: Form
    judgement: Judgement


@contextmanager
def judging() -> Generator[None]:
    """Forms are judged inside, without the fixes of what is refused.

    Three quarters of the time goes to fixes, and they do not change what is accepted.
    """

    def none(*_: Any) -> list[Any]:
        return []

    before = refusals._fixes
    refusals._fixes = none
    try:
        with limits():
            yield
    finally:
        refusals._fixes = before


def forms_of(op: str, slots: str, start: int, end: int) -> tuple[str, str]:
    """A killer: forms `start` to `end` of an op, about the slot of these names if any."""
    return "forms", f"{op} {slots or '-'} {start} {end}"


@functools.lru_cache(maxsize=512)
def known(argument: str) -> tuple[Known, ...]:
    """Draw and judge forms; asked first while the tables are as they are."""
    op, slots, start, end = argument.split()
    about = () if slots == "-" else slots.split(",")
    found: list[Known] = []
    if not signatures(op):
        return ()
    with judging():
        for number in range(int(start), int(end)):
            first = first_valid(op, number, 0, about)
            if first is not None:
                found.append(Known(number, *first))
    return tuple(found)


def failure_of(argument: str) -> str:
    """What a form says that is judged wrongly with the tables as they are, if one is."""
    every = known(argument)
    return next((f"{x.form.line}: {x.judgement}" for x in every if x.judgement.fails), "")


def check_known(argument: str) -> None:
    """Raise AssertionError at the first form that is judged worse than it was.

    It is if it is false now, or refused though it was accepted and true, or Varying though
    its type said something.
    """
    with judging():
        for each in known(argument):
            torch.default_generator.manual_seed(each.number)
            now = judge(each.form, random.Random(each.number))
            before = each.judgement
            said = f"{now.kind}: {each.form.line} {now.detail}"
            assert before.fails or not now.fails, said
            assert before.kind != "accepted" or now.kind == "accepted", f"lost, {said}"
            assert now.claims or not before.claims, f"only Varying, {said}"
