"""Draws: dropout is one mask of the whole value, each element drawn once.

Two ranks drop elements of a value, with one generator or with two. What the types may say
of the result follows from what the ranks hold: the value times one mask, in values and in
gradients, and different elements of it drawn apart. Equal values that are dropped apart
become Varying, if nothing better holds and their gradients add up. Where no type is right
the draw must be refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from placements.annotations.declarations import assert_type, type_of
from placements.checker.mode import typecheck
from placements.runtime.errors import PlacementError
from placements.runtime.mesh import set_current_mesh
from placements.runtime.state import shared_generator
from placements.testing.draw.placed import split_ranks
from placements.testing.strategies import seeded
from placements.types.axis import AxisType, I, P, R, Shard, V
from placements.types.extents import Even
from placements.types.meaning import join, split
from placements.types.mesh import Mesh
from placements.types.tensor import make

AXIS = "tp"
MESH = Mesh({AXIS: 2})
WHOLE = torch.arange(1.0, 33.0, dtype=torch.float64)
TYPES: dict[str, AxisType] = {"R": R, "I": I, "P": P, "S": Shard(0, Even(32, 2)), "V": V}

# Written out, since a law must not read what it judges.
_DUAL = {"R": P, "P": R, "I": I, "S": TYPES["S"]}


@dataclass(frozen=True)
class Dropped:
    """What one rank did: its value, the result, and the letter that was inferred."""

    x: Tensor
    y: Tensor
    letter: str | None  # None: refused

    @property
    def mask(self) -> Tensor:
        return (self.y / self.x).detach()


def check_draw(letter: str, shared: bool) -> None:
    """Raise AssertionError if dropout of such a value is accepted or refused wrongly."""
    places = [MESH.seen_from(place) for place in MESH.coordinates()]
    types = [make(seen, {AXIS: TYPES[letter]}) for seen in places]
    held = split_ranks(lambda place: WHOLE + 50 * sum(place), types, MESH, seeded(0))
    runs = [_dropped(r, held[r], TYPES[letter], shared) for r in range(2)]
    right = _right_letters(letter, runs)
    said = runs[0].letter
    generators = "one generator" if shared else "two generators"
    assert said in (right or {None}), (
        f"dropout of {letter}, {generators}: {said or 'refused'}, right: {right or 'none'}"
    )


def _dropped(rank: int, held: Tensor, src: AxisType, shared: bool) -> Dropped:
    x = held.clone().requires_grad_()
    torch.default_generator.manual_seed(1 if shared else 1 + rank)
    with set_current_mesh(MESH.seen_from({AXIS: rank})), typecheck():
        assert_type(x, {AXIS: src})
        try:
            with shared_generator(*([AXIS] if shared else [])):
                y = torch.nn.functional.dropout(x)
        except PlacementError:
            y = None
        found = None if y is None else type_of(y)
    if y is None or found is None:
        return Dropped(x, torch.nn.functional.dropout(x), None)
    return Dropped(x, y, found[AXIS].letter)


def _right_letters(letter: str, runs: Sequence[Dropped]) -> set[str]:
    apart = not torch.equal(runs[0].mask, runs[1].mask)
    if letter in "VS" and not apart:
        return set()  # different elements were dropped together
    if letter == "V":
        return {"V"}
    right = {name for name in "RIPS" if _is_masked(runs, letter, name)}
    if right or letter in "PS":
        return right  # a summand, dropped alone, says nothing of the value
    # Equal values, dropped apart: every rank sends back a gradient of its own.
    grads = [torch.autograd.grad(run.y.sum(), run.x, retain_graph=True)[0] for run in runs]
    total = runs[0].mask + runs[1].mask
    return {"V"} if _joins_to(grads, _DUAL[letter], total) else set()


def _is_masked(runs: Sequence[Dropped], src: str, dst: str) -> bool:
    """Return whether the ranks' results, read as `dst`, are the value times one mask."""
    sizes = {AXIS: len(runs)}
    try:
        joined = join([run.y.detach() for run in runs], {AXIS: TYPES[dst]}, sizes)
    except ValueError:
        return False
    if joined.shape != WHOLE.shape:
        return False
    mask = joined / WHOLE
    if not bool(((mask == 0) | (mask == 2)).all()):
        return False
    weights = split(torch.ones_like(WHOLE), {AXIS: _DUAL[dst]}, MESH)
    try:
        grads = [
            torch.autograd.grad(run.y, run.x, w, retain_graph=True)[0]
            for run, w in zip(runs, weights, strict=True)
        ]
    except RuntimeError:  # a part of the gradient does not fit: another shape
        return False
    return _joins_to(grads, _DUAL[src], mask)


def _joins_to(held: Sequence[Tensor], t: AxisType, wanted: Tensor) -> bool:
    try:
        return torch.equal(join(list(held), {AXIS: t}, {AXIS: len(held)}), wanted)
    except ValueError:
        return False
