"""Find where ranks took different branches on numbers that belong to mesh axes.

That alone is no lie: `if rank == 0: print(...)` harms nobody. But types do not follow
branches. So a lie that comes after such a branch names it, and a step without any lie ends
with a warning.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from placements.runtime.forgotten import parted
from placements.verification.logs import Log, Positions, Question, entries_along


class Parting(NamedTuple):
    """A question that ranks of one axis answered differently."""

    position: int
    axis: str
    where: str
    text: str


def different_branches(logs: Mapping[int, Log], at: Positions) -> list[str]:
    """Return what ranks asked alike and answered differently, once for each line."""
    first: dict[tuple[str, str], str] = {}
    for one in partings(logs, at):
        first.setdefault((one.where, one.axis), one.text)
    return list(dict.fromkeys(first.values()))


def partings(logs: Mapping[int, Log], at: Positions) -> list[Parting]:
    """Return where ranks parted, in the order of the program."""
    found = dict.fromkeys(_partings(logs, at))
    return sorted(found, key=lambda one: one.position)


def _partings(logs: Mapping[int, Log], at: Positions) -> Iterator[Parting]:
    for axis, questions in entries_along(logs, at, Question):
        by_key: dict[Any, dict[int, tuple[int, Question]]] = {}
        for rank, placed in questions.items():
            for position, asked in placed:
                by_key.setdefault((asked.found, asked.call), {})[rank] = position, asked
        for alike in by_key.values():
            answers = {rank: asked.answer for rank, (_, asked) in alike.items()}
            if len(set(answers.values())) > 1:
                position, asked = next(iter(alike.values()))
                yield Parting(position, axis, asked.where, parted(asked.found, answers))


def before(parted_at: list[Parting], position: int, axis: str | None) -> str:
    """Return the last parting of an axis's ranks before a place; "" if there is none."""
    earlier = [p.text for p in parted_at if p.position < position and p.axis == axis]
    return earlier[-1] if earlier else ""
