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

import torch
from torch import Tensor

from placements.declarations import type_of
from placements.errors import PlacementError
from placements.mesh import set_current_mesh
from placements.propagate import typecheck
from placements.state import shared_generator
from placements.tags import put
from placements.tensor_type import TensorType, make
from placements.testing.laws.comparison import (
    Comparison,
    RankResult,
    Tally,
    tensors_in,
)
from placements.testing.laws.placed_calls import InvalidCallError, PlacedCall
from placements.types import Shard, V


def require_accepted(name: str, tally: Tally) -> None:
    """A law that accepted nothing, or nothing that is spread over ranks, shows nothing."""
    assert tally.accepted, f"{name}: no call was accepted out of {tally.tried}"
    if tally.operands:
        assert tally.letters & set("SPR"), f"{name}: accepted {tally.letters} only"


def check_sound(placed: PlacedCall, tally: Tally | None = None) -> bool:
    """Whether the checker accepts the call; AssertionError if it does so wrongly."""
    tally = tally or Tally()
    tally.tried += 1
    try:
        held = placed.locals()
    except InvalidCallError:
        return False
    ranks = _run_ranks(placed, held)
    if ranks is None:
        return False
    _check_same_types(placed, ranks)
    tally.accepted += 1
    tally.operands += len(placed.call.operands)
    tally.letters |= {t.letter for types in placed.types for t in types[0].types}
    try:
        Comparison(placed, held, ranks, tally).run()
    except ValueError as error:  # what a type calls equal, or pieces, is not
        raise AssertionError(f"{placed!r}: {error}; {ranks[0].types}") from error
    return True


def _run_ranks(
    placed: PlacedCall, held: Sequence[Sequence[Tensor]]
) -> list[RankResult] | None:
    """Run the call on every rank; None if one of them refuses, or torch does there."""
    ranks: list[RankResult] = []
    for r, place in enumerate(placed.mesh.coordinates()):
        try:
            ranks.append(_run_rank(placed, r, place, [h[r] for h in held]))
        except (PlacementError, RuntimeError, IndexError, ValueError):
            return None
    return ranks


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


def _check_same_types(placed: PlacedCall, ranks: Sequence[RankResult]) -> None:
    """All ranks infer the same, extents of inner cuts aside."""
    said = {tuple(map(_in_common, rank.types)) for rank in ranks}
    assert len(said) == 1, f"{placed!r}: the ranks infer different types: {said}"


def _in_common(t: TensorType) -> tuple[str, ...]:
    """A type without what may differ by rank: the extents of inner cuts."""
    parts: list[str] = []
    for axis, one in t.items():
        if isinstance(one, Shard):
            outermost = t.order(one.dim)[0] == axis
            parts.append(f"{axis}:S({one.dim}, {one.extent if outermost else '...'})")
        else:
            parts.append(f"{axis}:{one!r}")
    return tuple(parts)


def check_forgetting(placed: PlacedCall) -> None:
    """What is accepted for pieces is accepted for values that are merely different."""
    if any(given.rows_of is not None for given in placed.call.operands):
        return  # an index of pieces says which pieces it means
    if any(t.letter == "P" for types in placed.types for t in types[0].types):
        return  # pieces that are contracted are summands; values that differ are not
    forgotten = replace(
        placed,
        types=[
            [
                make(t.mesh, {a: V if isinstance(x, Shard) else x for a, x in t.items()})
                for t in types
            ]
            for types in placed.types
        ],
    )
    place = placed.mesh.coordinates()[0]
    held = [operand[0] for operand in placed.locals()]
    try:
        _run_rank(forgotten, 0, place, held)
    except PlacementError as refusal:
        raise AssertionError(f"{placed!r} is accepted, {forgotten!r} is not") from refusal
