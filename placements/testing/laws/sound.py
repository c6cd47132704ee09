"""Sound: what the checker accepts computes the single-device result, and its gradients.

The law loops over the table of ops itself. Operands are drawn on all ranks of a drawn
mesh; every rank runs the real op under the real checker; the results, joined by the
types that the checker inferred, must be the op on the global values. The backward of
every rank is seeded with its part of one global cotangent, as the dual of the inferred
type says, and the gradients must join, by the dual of the operand's type, to the global
gradient. Nothing communicates, so ranks are a loop.

On an axis where something is Varying there is no global value: there the ranks are kept
apart, and each is compared with the op on what it holds together with the other axes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from placements.annotations.declarations import type_of
from placements.checker.mode import typecheck
from placements.runtime.errors import PlacementError
from placements.runtime.mesh import set_current_mesh
from placements.runtime.state import shared_generator
from placements.runtime.tags import put
from placements.testing.cases.build import is_in_place
from placements.testing.laws.comparison import Comparison, RankResult, Tally, tensors_in
from placements.testing.laws.placed_calls import InvalidCallError, PlacedCall
from placements.testing.laws.precise import check_precise
from placements.testing.ranks.crashes import check_judged
from placements.types.axis import AxisType, Shard, V
from placements.types.tensor import TensorType, make


def require_accepted(name: str, tally: Tally) -> None:
    """Raise AssertionError if a law accepted nothing, or nothing spread over ranks."""
    assert tally.accepted, f"{name}: no call was accepted out of {tally.tried}"
    if tally.operands:
        assert tally.letters & set("SPR"), f"{name}: accepted {tally.letters} only"


def check_sound(placed: PlacedCall, tally: Tally | None = None) -> bool:
    """Return whether the checker accepts the call; AssertionError if it does so wrongly."""
    tally = tally or Tally()
    tally.tried += 1
    try:
        held = placed.locals()
    except InvalidCallError:
        return False
    ranks, error = run_each_rank(placed, held)
    if error is not None:
        return False
    check_results(placed, held, ranks, tally)
    return True


def check_results(
    placed: PlacedCall,
    held: Sequence[Sequence[Tensor]],
    ranks: Sequence[RankResult],
    tally: Tally,
) -> None:
    """Check that the results, joined by the inferred types, are the global result."""
    _check_same_types(placed, ranks)
    check_precise(placed, ranks[0].types)
    tally.accepted += 1
    tally.operands += len(placed.call.operands)
    tally.letters |= {t.letter for types in placed.types for t in types[0].types}
    try:
        Comparison(placed, held, ranks, tally).run()
    except ValueError as error:  # what a type calls equal, or pieces, is not
        raise AssertionError(f"{placed!r}: {error}; {ranks[0].types}") from error


def run_each_rank(
    placed: PlacedCall, held: Sequence[Sequence[Tensor]]
) -> tuple[list[RankResult], Exception | None]:
    """Run the call on every rank, up to the first that refuses, or where torch does.

    CheckerCrash if the checker fails on what torch accepts: that is no refusal.
    """
    ranks: list[RankResult] = []
    for r, place in enumerate(placed.mesh.coordinates()):
        try:
            ranks.append(_run_rank(placed, r, place, [h[r] for h in held]))
        except Exception as error:
            check_judged(error, partial(_run_plainly, placed, [h[r] for h in held]))
            return ranks, error
    return ranks, None


def _run_rank(
    placed: PlacedCall, r: int, place: dict[str, int], held: Sequence[Tensor]
) -> RankResult:
    inputs = [
        x.detach().clone().requires_grad_(given.has_gradient)
        for x, given in zip(held, placed.call.operands, strict=True)
    ]
    alone = [p for axis, p in place.items() if axis not in placed.shared]
    torch.default_generator.manual_seed(1 + sum(p * 7**k for k, p in enumerate(alone)))
    with set_current_mesh(placed.mesh.seen_from(place)), typecheck():
        for x, types in zip(inputs, placed.types, strict=True):
            put(x, types[r])
        with shared_generator(*placed.shared):
            outputs = tensors_in(placed.call.run(*inputs))
        types = [type_of(output) for output in outputs]
    found = [t for t in types if t is not None]
    assert len(found) == len(types), f"{placed!r}: a result without a type"
    return RankResult(inputs, outputs, found)


def _run_plainly(placed: PlacedCall, held: Sequence[Tensor]) -> None:
    placed.call.run(
        *(
            x.detach().clone().requires_grad_(given.has_gradient)
            for x, given in zip(held, placed.call.operands, strict=True)
        )
    )


def _check_same_types(placed: PlacedCall, ranks: Sequence[RankResult]) -> None:
    """Check that all ranks infer the same, and extents where they share rows."""
    said = {tuple(map(_without_extents, rank.types)) for rank in ranks}
    assert len(said) == 1, f"{placed!r}: the ranks infer different types: {said}"
    for k, common in enumerate(ranks[0].types):
        for axis, t in common.items():
            if not isinstance(t, Shard):
                continue
            # Where the ranks hold unrelated values, or other runs of an outer cut, they
            # have other rows to cut.
            own = {a for a, other in common.items() if other.letter == "V"}
            own |= set(common.order(t.dim)[: common.order(t.dim).index(axis)])
            found: dict[tuple[int, ...], set[AxisType]] = {}
            for rank in ranks:
                place = rank.types[k].mesh.place
                group = tuple(place[a] for a in common if a in own)
                found.setdefault(group, set()).add(rank.types[k][axis])
            different = [types for types in found.values() if len(types) > 1]
            assert not different, f"{placed!r}: ranks cut {axis} differently: {different}"


def _without_extents(t: TensorType) -> tuple[str, ...]:
    return tuple(
        f"{axis}:S({one.dim})" if isinstance(one, Shard) else f"{axis}:{one!r}"
        for axis, one in t.items()
    )


def check_forgetting(placed: PlacedCall) -> None:
    """Check that what is accepted for pieces is accepted for Varying values.

    It is so for all operands together, and for each of them alone.
    """
    if any(given.rows_of is not None for given in placed.call.operands):
        return  # an index of pieces says which pieces it means
    if any(t.letter == "P" for types in placed.types for t in types[0].types):
        return  # pieces that are contracted are summands; values that differ are not
    every = range(len(placed.types))
    place = placed.mesh.coordinates()[0]
    held = [operand[0] for operand in placed.locals()]
    forgotten = _forgotten(placed, every)
    try:
        _run_rank(forgotten, 0, place, held)
    except PlacementError as refusal:
        raise AssertionError(f"{placed!r} is accepted, {forgotten!r} is not") from refusal
    if is_in_place(placed.call.name):
        return  # what is written keeps its type, so it must have it
    for k in every:
        if 1 in held[k].shape:
            continue  # one row that is not known to be a piece would be broadcast
        one = _forgotten(placed, [k])
        try:
            _run_rank(one, 0, place, held)
        except PlacementError as refusal:
            raise AssertionError(f"{placed!r} is accepted, {one!r} is not") from refusal


def _forgotten(placed: PlacedCall, operands: Sequence[int]) -> PlacedCall:
    def types(k: int) -> list[TensorType]:
        if k not in operands:
            return list(placed.types[k])
        return [
            make(t.mesh, {a: V if isinstance(x, Shard) else x for a, x in t.items()})
            for t in placed.types[k]
        ]

    return replace(placed, types=[types(k) for k in range(len(placed.types))])
