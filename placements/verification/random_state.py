"""Compare the states of the ranks' random generators with what the program claims.

On the axes of a `shared_generator` all ranks draw from one state. On the others a value
that differs by rank, or that a draw makes differ, needs numbers of each rank's own: two
ranks in one state would mask different rows alike.
"""

from collections.abc import Iterator, Mapping, Sequence

from placements.runtime.errors import PlacementError
from placements.types.axis import WORDS
from placements.verification.logs import (
    Lie,
    Log,
    Positions,
    RandomDraw,
    contradiction,
    entries_along,
)

# A draw, and its place in the order of the program.
_Placed = tuple[int, RandomDraw]


def draw_lies(logs: Mapping[int, Log], at: Positions) -> Iterator[Lie]:
    """Yield the draws whose generators are not in the states that the program claims."""
    for axis, draws in entries_along(logs, at, RandomDraw):
        found = {
            rank: {
                (draw.where, draw.call): (position, draw)
                for position, draw in placed
                if axis in draw.letters
            }
            for rank, placed in draws.items()
        }
        yield from _along(axis, found)


def _along(
    axis: str, found: Mapping[int, Mapping[tuple[str, int], _Placed]]
) -> Iterator[Lie]:
    for key in dict.fromkeys(key for draws in found.values() for key in draws):
        placed = {rank: draws[key] for rank, draws in found.items() if key in draws}
        drew = {rank: draw for rank, (_, draw) in placed.items()}
        position = min(position for position, _ in placed.values())
        first = next(iter(drew.values()))
        absent = [rank for rank in found if rank not in drew]
        # Where each rank draws for itself one that has no rows draws nothing.
        if axis in first.shared:
            differ = next((r for r in drew if drew[r].state != first.state), None)
            ranks = [next(iter(drew)), *([differ] if differ is not None else absent)]
        else:
            ranks = _alike(drew)
        if len(ranks) > 1:
            yield Lie(position, _error(axis, first, ranks[:2]))


def _alike(drew: Mapping[int, RandomDraw]) -> list[int]:
    """Return the first ranks that draw from one state."""
    by_state: dict[int, list[int]] = {}
    for rank, draw in drew.items():
        by_state.setdefault(draw.state, []).append(rank)
    return next((ranks for ranks in by_state.values() if len(ranks) > 1), list[int]())


def _error(axis: str, draw: RandomDraw, ranks: Sequence[int]) -> PlacementError:
    who = f"ranks {ranks[0]} and {ranks[1]}"
    kind = WORDS[draw.letters[axis]]
    if axis in draw.shared:
        return contradiction(
            draw.where,
            f"{who} of axis {axis!r} draw different numbers for {draw.name}, but "
            f"shared_generator({axis!r}) says that they draw the same",
            name=draw.name,
            axis=axis,
            expected="one state of the generators",
            actual=f"another state on {who}",
            rule="what is drawn from a shared generator stays equal only if the ranks "
            "were seeded alike and have drawn as often",
            advice="seed all ranks of the axis alike (torch.manual_seed(seed)), and let "
            f"ranks draw numbers of their own only inside own_generator({axis!r})",
        )
    return contradiction(
        draw.where,
        f"{who} of axis {axis!r} draw the same numbers for {draw.name}, which is {kind} "
        "there",
        name=draw.name,
        axis=axis,
        expected="a state of its own on each rank",
        actual=f"one state on {who}",
        rule="different rows need different numbers; equal ones are for equal values, "
        "and are said by shared_generator",
        advice=f"with own_generator({axis!r}): ... (or seed the ranks apart, "
        "torch.manual_seed(seed + rank))"
        + f"; with shared_generator({axis!r}): ... if they are meant to be equal"
        * (draw.letters[axis] == "R"),
    )
