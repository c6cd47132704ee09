"""What one rank logs of a step, and sends to the others to be compared.

Everything here is plain data that is equal on ranks that saw the same.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple, TypeVar, Unpack

from placements.runtime.errors import Details, PlacementError
from placements.runtime.fingerprints import Fingerprint
from placements.runtime.forgotten import Forgotten
from placements.types.axis import WORDS, Shard
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

VALUE, GRADIENT, COLLECTIVE, DRAW = "value", "gradient", "collective", "draw"
QUESTION = "question"


class Claim(NamedTuple):
    """What a tensor is said to be on one axis: a letter, and the cut of a Shard."""

    letter: str
    dim: int = 0
    sizes: tuple[int, ...] = ()  # of the pieces, as this rank has it
    held: int = 0

    def __str__(self) -> str:
        return f"S({self.dim})" if self.letter == "S" else WORDS[self.letter]


# One claim for each letter: a log of many ranks would hold a hundred times as many that are
# equal, and Python's search for garbage goes through all that is held.
UNCUT = {letter: Claim(letter) for letter in "RIP"}


class MeshKey(NamedTuple):
    """A mesh by value: equal on all ranks that share it."""

    sizes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh) -> "MeshKey":
        return cls(tuple(mesh.sizes.items()), mesh.rank_order())

    def groups(self, axis: str) -> list[list[int]]:
        """Return the ranks that differ in their place on `axis` only, in that order."""
        ranges = [range(n) for _, n in self.sizes]
        at = [name for name, _ in self.sizes].index(axis)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in zip(self.ranks, product(*ranges), strict=True):
            groups.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
        return list(groups.values())


class Event(NamedTuple):
    """One crossing: where, of what, and what was claimed on each axis."""

    kind: str
    where: str
    call: int
    name: str
    mesh: MeshKey
    claims: Mapping[str, Claim]
    fingerprint: Fingerprint | None = None
    cause: str = ""  # of a gradient: the letter of the value


class RandomDraw(NamedTuple):
    """Random numbers that were drawn: by which op, from which state of a generator."""

    where: str
    call: int
    name: str  # of the tensor that they are for
    mesh: MeshKey
    letters: Mapping[str, str]  # what it is, on the axes of which something is claimed
    shared: frozenset[str]  # the axes on which all ranks are said to draw alike
    state: int


class Question(NamedTuple):
    """A number that belongs to axes was asked for a plain answer: a branch."""

    where: str
    call: int
    found: Forgotten
    mesh: MeshKey
    answer: bool | float


# What tells an entry of a log apart from the other entries, and is equal on ranks that run
# the same program: kind, site, which call there, name, cause, and which time.
Key = tuple[str, str, int, str, str, int]


Entry = Event | RandomDraw | Question


@dataclass
class Log:
    """What one rank saw of a step, in the order in which it happened."""

    entries: list[Entry] = field(default_factory=list[Entry])
    # Parameters that took part and got no gradient, if any parameter got one.
    without_gradient: list[str] = field(default_factory=list[str])
    backward_ran: bool = False

    def keys(self) -> list[Key]:
        """Return the key of every entry."""
        passed: Counter[tuple[str, str, int, str, str]] = Counter()
        keys: list[Key] = []
        for one in self.entries:
            kind, name, cause = DRAW, "", ""
            if isinstance(one, Event):
                kind, name, cause = one.kind, one.name, one.cause
            elif isinstance(one, Question):
                kind, name = QUESTION, one.found.text
            passed[kind, one.where, one.call, name, cause] += 1
            time = passed[kind, one.where, one.call, name, cause]
            keys.append((kind, one.where, one.call, name, cause, time))
        return keys

    def last(self) -> str:
        """Return how far this rank came."""
        events = [entry for entry in self.entries if isinstance(entry, Event)]
        crossings = [e for e in events if e.kind != COLLECTIVE]
        sent = [e for e in events if e.kind == COLLECTIVE]
        last = f"{crossings[-1].where}: {crossings[-1].name}" if crossings else "none"
        collective = f"{sent[-1].name} at {sent[-1].where}" if sent else "none"
        return (
            f"the last crossing on this rank was {last}; it had started {len(sent)} "
            f"collectives, the last one {collective}{self._last_branch()}"
        )

    def _last_branch(self) -> str:
        asked = [entry for entry in self.entries if isinstance(entry, Question)]
        if not asked:
            return ""
        return (
            f"; its last branch on a number that belongs to an axis was {asked[-1].found}, "
            f"with {asked[-1].answer!r} on this rank"
        )


class Lie(NamedTuple):
    """A claim that does not hold, and its place in the order of the program."""

    position: int
    error: PlacementError


def contradiction(where: str, problem: str, **details: Unpack[Details]) -> PlacementError:
    """`verify: where: problem`: the error for what was logged at `where`."""
    return PlacementError(f"verify: {where}: {problem}", where=where, **details)


# By rank: the place of each of its entries in the order of the whole program.
Positions = Mapping[int, list[int]]


def program_order(logs: Mapping[int, Log]) -> Positions:
    """Return one order of what all ranks logged, which keeps every rank's own order.

    What only some ranks logged comes right after what they logged before it. So a rank
    that did something alone is not ahead of the others from then on, and what follows
    from that is later than it. (Ranks that ran in different orders have none in common;
    then the first rank's counts.)
    """
    start: Key = ("", "", 0, "", "", 0)
    following: dict[Key, Key | None] = {start: None}  # a list in which one can insert
    by_rank = {rank: log.keys() for rank, log in logs.items()}
    for keys in by_rank.values():
        before = start
        for key in keys:
            if key not in following:
                following[key], following[before] = following[before], key
            before = key
    place: dict[Key, int] = {}
    key = following[start]
    while key is not None:
        place[key] = len(place)
        key = following[key]
    return {rank: [place[key] for key in keys] for rank, keys in by_rank.items()}


T = TypeVar("T", Event, RandomDraw, Question)


def entries_along(
    logs: Mapping[int, Log], at: Positions, kind: type[T]
) -> Iterator[tuple[str, dict[int, list[tuple[int, T]]]]]:
    """Yield each axis with ranks along it, and their entries of one kind on its mesh.

    The entries are by rank, each with its place in the order of the program.
    """
    placed = {
        rank: [
            (position, entry)
            for position, entry in zip(at[rank], log.entries, strict=True)
            if isinstance(entry, kind)
        ]
        for rank, log in logs.items()
    }
    meshes = dict.fromkeys(entry.mesh for found in placed.values() for _, entry in found)
    for mesh in meshes:
        for axis, size in mesh.sizes:
            for group in mesh.groups(axis) if size > 1 else ():
                ranks = [rank for rank in group if rank in logs]
                yield (
                    axis,
                    {
                        rank: [one for one in placed[rank] if one[1].mesh == mesh]
                        for rank in ranks
                    },
                )


def claims_of(found: TensorType, shape: tuple[int, ...]) -> dict[str, Claim]:
    """Return the claims of a type about a tensor of this shape that ranks can compare."""
    claims: dict[str, Claim] = {}
    for axis, t in found.items():
        if isinstance(t, Shard):
            cuts = found.cuts(t.dim)
            at = [cut_by for cut_by, _ in cuts].index(axis)
            # A piece that is cut again is held by several ranks together.
            held = cuts[at + 1][1].total if at + 1 < len(cuts) else shape[t.dim]
            claims[axis] = Claim("S", t.dim, cuts[at][1].sizes, held)
        elif t.letter in "RI":
            claims[axis] = UNCUT[t.letter]
    return claims
