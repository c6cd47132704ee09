"""Compare what ranks logged of one step, and find the first claim that does not hold.

A log is what one rank saw at crossings, in program order. Ranks are compared along one
mesh axis at a time, event by event: an event is known by its site, by how often the site
was passed before, and by the tensor's name there. An event that only some ranks have is
itself a finding. Of several findings the first in the order of the program is told, since
the others may follow from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from placements.runtime.errors import PlacementError
from placements.runtime.fingerprints import Fingerprint
from placements.types.axis import REASONS
from placements.verification.branches import before, different_branches, partings
from placements.verification.logs import (
    COLLECTIVE,
    GRADIENT,
    VALUE,
    Event,
    Lie,
    Log,
    Positions,
    contradiction,
    entries_along,
    program_order,
)
from placements.verification.random_state import draw_lies


def verdict(logs: Mapping[int, Log]) -> tuple[PlacementError | None, list[str]]:
    """Return the first lie; without one, where ranks took different branches."""
    at = program_order(logs)
    lie = first_lie(logs, at)
    return lie, [] if lie is not None else different_branches(logs, at)


def first_lie(logs: Mapping[int, Log], at: Positions) -> PlacementError | None:
    """Return the first claim in program order that the ranks' logs contradict.

    If ranks of its axis parted before it, the error names the branch.
    """
    lies = sorted([*_lies(logs, at), *draw_lies(logs, at)], key=lambda lie: lie.position)
    if not lies:
        return _without_gradient(logs)
    position, error = lies[0]
    branch = before(partings(logs, at), position, error.axis)
    if branch:
        error.after(f"{branch}; types do not follow branches")
    # What lies once often shows on several axes and at later crossings.
    first, *later = dict.fromkeys(f"{lie.error.where}: {lie.error.name}" for lie in lies)
    if later:
        lies[0].error.add_note(f"after {first}, also at {'; '.join(later[:5])}")
    return lies[0].error


def _lies(logs: Mapping[int, Log], at: Positions) -> Iterator[Lie]:
    for axis, events in entries_along(logs, at, Event):
        numbered = {
            rank: [one for one in found if axis in one[1].claims]
            for rank, found in events.items()
        }
        yield from _collectives(axis, numbered)
        yield from _crossings(axis, numbered)


Numbered = Mapping[int, Sequence[tuple[int, Event]]]


def _collectives(axis: str, numbered: Numbered) -> Iterator[Lie]:
    """Find the first place where ranks do not run the same collective."""
    runs = [
        [one for one in events if one[1].kind == COLLECTIVE] for events in numbered.values()
    ]
    for number, row in enumerate(zip_longest(*runs)):
        said = [f"{e[1].name} at {e[1].where}" if e else "none" for e in row]
        if len(set(said)) > 1:
            position, event = min((one for one in row if one), key=lambda one: one[0])
            lines = [
                f"rank {rank}: {text}" for rank, text in zip(numbered, said, strict=True)
            ]
            yield Lie(
                position,
                PlacementError(
                    f"verify: collective {number + 1} over axis {axis!r} is not the same "
                    f"on {_ranks(numbered)}: {'; '.join(lines)}",
                    where=event.where,
                    name=event.name,
                    axis=axis,
                    expected=said[0],
                    actual="; ".join(lines),
                    rule="all ranks of an axis run the same collectives in the same order",
                    operands=lines,
                    advice="let every rank take part, with zero rows if it has none",
                ),
            )
            return


def _crossings(axis: str, numbered: Numbered) -> Iterator[Lie]:
    by_key = [
        {(*e[:2], e.call, e.name): (k, e) for k, e in events if e.kind != COLLECTIVE}
        for events in numbered.values()
    ]
    for key in dict.fromkeys(key for found in by_key for key in found):
        at = {
            rank: found[key]
            for rank, found in zip(numbered, by_key, strict=True)
            if key in found
        }
        position = min(k for k, _ in at.values())
        events = {rank: event for rank, (_, event) in at.items()}
        error = _missing(axis, events, list(numbered)) or _contradiction(axis, events)
        if error is not None:
            yield Lie(position, error)


def _missing(
    axis: str, events: Mapping[int, Event], ranks: Sequence[int]
) -> PlacementError | None:
    absent = [rank for rank in ranks if rank not in events]
    if not absent:
        return None
    event = next(iter(events.values()))
    what = "the gradient of " * (event.kind == GRADIENT) + event.name
    return contradiction(
        event.where,
        f"{what} is seen on {_ranks(list(events))}, but not on {_ranks(absent)} of axis "
        f"{axis!r}",
        name=event.name,
        axis=axis,
        expected=f"{event.kind} on {_ranks(ranks)}",
        actual=f"{event.kind} on {_ranks(list(events))}",
        rule="no gradient reached it there, though its type says that all have the same"
        if event.kind == GRADIENT
        else "all ranks of an axis run the same program",
    )


def _contradiction(axis: str, events: Mapping[int, Event]) -> PlacementError | None:
    (first_rank, first), *others = events.items()
    mine = first.claims[axis]
    held = tuple(event.claims[axis].held for event in events.values())
    for rank, other in others:
        theirs = other.claims[axis]
        if (mine.letter, mine.dim) != (theirs.letter, theirs.dim):
            return _error(axis, events, first, f"{mine}", f"{theirs} on rank {rank}")
        if mine.letter == "S":
            if mine.sizes != theirs.sizes or held != mine.sizes:
                return _extents(axis, events, first)
        elif mine.letter in "RI":
            assert first.fingerprint is not None and other.fingerprint is not None
            if not first.fingerprint.agrees(other.fingerprint):
                differ = f"different on ranks {first_rank} and {rank}"
                return _error(axis, events, first, f"{mine} (equal values)", differ)
    return None


def _extents(axis: str, events: Mapping[int, Event], first: Event) -> PlacementError:
    held = tuple(event.claims[axis].held for event in events.values())
    dim, sizes = first.claims[axis].dim, first.claims[axis].sizes
    return contradiction(
        first.where,
        f"{first.name} is S({dim}) on axis {axis!r} and the ranks hold {held} rows of dim "
        f"{dim}, but they do not agree on the extent",
        name=first.name,
        axis=axis,
        expected=f"pieces of {held} rows",
        actual=f"pieces of {sizes} rows, says rank {next(iter(events))}",
        rule="an extent says how many rows every rank holds, so all must say the same",
        operands=[
            f"rank {rank}: holds {event.claims[axis].held}, says {event.claims[axis].sizes}"
            for rank, event in events.items()
        ],
        advice=f"declare the pieces that there are: S({dim}, Ragged{held}), or Padded",
    )


_WHY = {
    "R": "Replicate means equal values on all ranks of the axis",
    "I": "Invariant means one computation that all ranks repeat, so equal values",
}
_ADVICE = {
    (VALUE, ""): "values that differ are Varying, Shard or Partial: say so where they are "
    "made, or make them equal there (all_reduce, all_gather)",
    (GRADIENT, "I"): "where ranks use the value in different ways, first "
    "convert({name}, {axis!r}, src=I, dst=R): its backward sums the gradient",
    (GRADIENT, "P"): "the sum must be done by a typed call: "
    "all_reduce({name}, {axis!r}, src=P, dst=R or I)",
}


def _error(
    axis: str, events: Mapping[int, Event], event: Event, expected: str, actual: str
) -> PlacementError:
    what = "the gradient of " * (event.kind == GRADIENT) + event.name
    letter = event.claims[axis].letter
    advice = _ADVICE.get((event.kind, event.cause), "").format(name=event.name, axis=axis)
    return contradiction(
        event.where,
        f"{what} is {actual} on axis {axis!r}, expected {expected}",
        name=event.name,
        axis=axis,
        expected=expected,
        actual=actual,
        rule=REASONS[event.cause] if event.cause else _WHY.get(letter, ""),
        operands=[
            f"rank {rank}: {e.claims[axis]}"
            + (f" {_printed(e.fingerprint)}" if e.fingerprint else "")
            for rank, e in events.items()
        ],
        advice=advice,
    )


def _printed(found: Fingerprint) -> str:
    shape = ", ".join(map(str, found.shape))
    return f"{found.dtype}[{shape}] norm {found.norm:.6g} projection {found.projection:.6g}"


def _ranks(ranks: Sequence[int] | Mapping[int, object]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank{'s' * (len(ranks) > 1)} {names}"


def _without_gradient(logs: Mapping[int, Log]) -> PlacementError | None:
    if not any(log.backward_ran for log in logs.values()):
        return None
    names = dict.fromkeys(name for log in logs.values() for name in log.without_gradient)
    if not names:
        return None
    name, *others = names
    ranks = [rank for rank, log in logs.items() if name in log.without_gradient]
    error = PlacementError(
        f"verify: parameter {name!r} got no gradient on {_ranks(ranks)}",
        where="backward",
        name=name,
        expected="a gradient",
        actual=f"None on {_ranks(ranks)}",
        rule="the optimizer skips a parameter without a gradient, so that its state "
        "differs from that of ranks that have one",
        advice="let it take part with zero rows, so that its gradient is zero; or "
        "requires_grad_(False) if it is not trained",
    )
    if others:
        error.add_note(f"after {name}, also {', '.join(others[:5])}")
    return error
