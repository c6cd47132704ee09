"""Decided: on one axis each combination of types is accepted rightly or refused rightly.

For a call every operand is tried as Replicate, Invariant, Partial and cut along each dim,
on two ranks. What is accepted must be sound. What is refused must have values for which
every type of the result is wrong, in values or in gradients; a refusal that is `policy`
says so by itself. Dims have four or six rows, so that every piece has several: with one
row, or none, almost anything is linear.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from placements.inference.terms import Refusal
from placements.runtime.errors import PlacementError
from placements.testing.cases import OpCall
from placements.testing.cases.build import is_in_place
from placements.testing.laws.comparison import Comparison, RankResult, Tally, tensors_in
from placements.testing.laws.placed_calls import InvalidCallError, PlacedCall
from placements.testing.laws.sound import check_results, run_each_rank
from placements.testing.strategies import seeded
from placements.types.axis import AxisType, I, P, R, Shard
from placements.types.extents import Even, Ragged
from placements.types.index import Index
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make

AXIS = "tp"
MESH = Mesh({AXIS: 2})
SEEDS = 12
SEVERAL_ROWS = (4, 6)  # sizes of dims, to draw calls with

# Operands that may be refused as P or I although that would be right: see the op's row.
STRICT: dict[str, frozenset[int]] = {
    "fill": frozenset({0, 1}),
    "cross_entropy": frozenset({2}),
    "nll_loss": frozenset({2}),
    "binary_cross_entropy": frozenset({2}),
    "binary_cross_entropy_with_logits": frozenset({2}),
}


def combinations(call: OpCall, most: int) -> list[tuple[AxisType, ...]]:
    """Return the types of all operands: every combination, or so many drawn ones."""
    single: dict[str, AxisType] = {"R": R, "I": I, "P": P}
    options: list[list[AxisType]] = []
    for given in call.operands:
        own = [t for letter, t in single.items() if letter in given.letters]
        if "S" in given.letters:
            own += [Shard(d, Even(n, 2)) for d, n in enumerate(given.shape) if n % 2 == 0]
        options.append(own)
    many = math.prod(map(len, options))  # five types of twenty operands: a list is too long
    if many <= most:
        return list(product(*options))
    # All of one letter first: a linear op takes a Partial only where every term is one.
    alike = [
        each
        for letter in "RIPS"
        for each in islice(
            product(*([t for t in o if t.letter == letter] for o in options)), most
        )
    ]
    shapes = [given.shape for given in call.operands]
    drawn = random.Random(seeded(call.text, shapes).initial_seed())
    others = (_numbered(options, k) for k in drawn.sample(range(many), min(many, 2 * most)))
    return list(dict.fromkeys([*alike, *others]))[:most]


def _numbered(options: Sequence[Sequence[AxisType]], number: int) -> tuple[AxisType, ...]:
    """Return one of all combinations by its number."""
    found: list[AxisType] = []
    for own in options:
        number, k = divmod(number, len(own))
        found.append(own[k])
    return tuple(found)


def check_decided(call: OpCall, *, most: int = 24) -> None:
    """Raise AssertionError if a combination is accepted wrongly, or refused without need.

    Of many combinations `most` are tried.
    """
    if call.drawn or any(0 in given.shape for given in call.operands):
        return
    for types in combinations(call, most):
        check_combination(call, types)


def check_combination(call: OpCall, types: Sequence[AxisType]) -> None:
    """Do what `check_decided` does, for one combination of the operands' types."""
    placed = PlacedCall(call, MESH, _placed(call, types), 0, False, ())
    try:
        held = _held(placed)
        ranks, error = run_each_rank(placed, held)
        if error is None:
            check_results(placed, held, ranks, Tally())
        elif isinstance(error, PlacementError) and not _is_policy(call, types, error):
            _check_refuted(placed)
    except InvalidCallError:
        return


def _check_refuted(placed: PlacedCall) -> None:
    """Check that every type of the result is wrong for some drawn values."""
    left: set[str] | None = None
    for seed in range(SEEDS):
        one = replace(placed, seed=seed)
        right = _right_types(one, _held(one))
        left = right if left is None or right is None else left & right
        if not left:
            return
    raise AssertionError(f"{placed!r} is refused, yet it is right as {left}")


def _is_policy(call: OpCall, types: Sequence[AxisType], error: PlacementError) -> bool:
    if any(types[k] in (P, I) for k in STRICT.get(call.name, ()) if k < len(types)):
        return True
    refusal = error.__context__
    return isinstance(refusal, Refusal) and refusal.kind == "policy"


def _placed(call: OpCall, types: Sequence[AxisType]) -> list[list[TensorType]]:
    """Return types by operand and rank; an index counts the rows that it can address."""
    places = [MESH.seen_from(place) for place in MESH.coordinates()]
    placed = [[make(seen, {AXIS: t}) for seen in places] for t in types]
    for k, given in enumerate(call.operands):
        if given.counts is not None:
            placed[k] = [t.with_index(Index(given.counts)) for t in placed[k]]
        if given.rows_of is None:
            continue
        target, dim = given.rows_of
        cuts = placed[target][0].cuts(dim)
        domain = Index(call.operands[target].shape[dim])
        if cuts and isinstance(types[k], Shard):
            domain = Index.of_cuts(cuts)
        placed[k] = [t.with_index(domain) for t in placed[k]]
    return placed


def _held(placed: PlacedCall) -> list[list[Tensor]]:
    """Return the operands' parts, of values that show what the op does."""
    name = placed.call.name
    if name.startswith(("logical", "any", "all")):
        return [_with_zeros(placed, k, parts) for k, parts in enumerate(placed.locals())]
    held: list[list[Tensor]] = []
    for k, (given, parts) in enumerate(
        zip(placed.call.operands, placed.locals(), strict=True)
    ):
        cut = isinstance(placed.types[k][0][AXIS], Shard)
        if cut and given.is_any_number and not given.dtype.is_floating_point:
            # Two large pieces of small numbers have the same largest one.
            held.append([x * (1 + 2 * (placed.seed % 2 == r)) for r, x in enumerate(parts)])
        elif not given.dtype.is_floating_point:
            held.append(parts)
        elif placed.types[k][0][AXIS] == P:
            halves = [x * 1.5 for x in parts]  # whole numbers hide what rounding does
            if any(word in name for word in ("nan", "inf", "finite")):
                _put_special(halves[0])
            held.append(halves)
        else:
            held.append([x + (x == 0) for x in parts])  # by zero nothing can be divided
    return held


def _with_zeros(placed: PlacedCall, k: int, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return parts with many zeros, now and then on one rank alone."""
    held = [x.clamp(min=0) for x in parts]
    if placed.seed % 2 and placed.types[k][0][AXIS].letter in "PS":
        return [held[0] * (placed.seed % 4 == 1), parts[1].abs() + 1]
    return held


def _put_special(x: Tensor) -> None:
    special = [float("nan"), float("inf"), -float("inf")]
    x.view(-1)[: len(special)] = torch.tensor(special[: x.numel()], dtype=x.dtype)


def _right_types(placed: PlacedCall, held: Sequence[Sequence[Tensor]]) -> set[str] | None:
    """Return the types that are right for the results; None if nothing was learned."""
    inputs: list[list[Tensor]] = []
    outputs: list[list[Tensor]] = []
    for r in range(2):
        inputs.append(
            [
                h[r].detach().clone().requires_grad_(given.has_gradient)
                for h, given in zip(held, placed.call.operands, strict=True)
            ]
        )
        try:
            # torch's fused attention writes past its memory where shapes do not fit.
            with sdpa_kernel(SDPBackend.MATH):
                outputs.append(tensors_in(placed.call.run(*inputs[r])))
        except (RuntimeError, IndexError, ValueError):
            return set()  # a rank cannot compute it: no type at all
    if _lacks_gradient(placed, inputs[0], outputs[0]):
        return None
    right: set[str] = set()
    for types in _candidates(placed, outputs):
        ranks = [RankResult(inputs[r], outputs[r], [t[r] for t in types]) for r in range(2)]
        comparison = Comparison(placed, held, ranks, Tally())
        if not _is_computed(placed, comparison):
            return None
        try:
            comparison.run()
        except (AssertionError, ValueError, RuntimeError):
            continue
        right.add(repr(types[0][0]))
    return right


def _lacks_gradient(
    placed: PlacedCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> bool:
    """Return whether an Invariant has no gradient, which alone shows it wrong."""
    if all(types[0][AXIS] != I for types in placed.types):
        return False
    floats = [x for x in inputs if x.dtype.is_floating_point]
    if not all(x.requires_grad for x in (*floats, *outputs)):
        return True
    try:
        grads = torch.autograd.grad(
            [y.sum() for y in outputs], floats, retain_graph=True, materialize_grads=True
        )
    except (RuntimeError, NotImplementedError):  # torch has no derivative for it
        return True
    return not any(bool(g.any()) for g in grads)  # of a step, like floor


def _is_computed(placed: PlacedCall, comparison: Comparison) -> bool:
    """Return whether one device computes it, and computes anything."""
    try:
        for values in comparison.global_inputs().values():
            results = tensors_in(placed.call.run(*values))
            if not all(result.numel() for result in results):
                return False
    except (RuntimeError, IndexError, ValueError):
        return False
    return True


def _candidates(
    placed: PlacedCall, outputs: Sequence[Sequence[Tensor]]
) -> Iterator[list[list[TensorType]]]:
    """Yield types by result and rank; what is written in place keeps its type."""
    places = [MESH.seen_from(place) for place in MESH.coordinates()]
    if is_in_place(placed.call.name):
        yield [list(placed.types[0])]
        return
    # A sum of truth values is a count.
    letters = (R, I) if any(x.dtype == torch.bool for x in outputs[0]) else (R, I, P)
    for t in letters:
        yield [[make(seen, {AXIS: t}) for seen in places] for _ in outputs[0]]
    for dim in range(min(x.dim() for x in outputs[0])):
        found: list[list[TensorType]] = []
        for k in range(len(outputs[0])):
            sizes = [outputs[r][k].shape[dim] for r in range(2)]
            shard = Shard(dim, Ragged(*sizes).over(2))
            found.append([make(seen, {AXIS: shard}) for seen in places])
        yield found
