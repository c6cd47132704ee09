"""The laws that are tried on a mutant, by name and argument, with bounded examples.

They are the laws of `placements.testing.laws`, derandomised and without shrinking: a
mutant is dead at the first AssertionError. Four laws live here and not yet there:
`refused ops` (an op that refuses sums has values for which no type is right), `numbers`
(zeros, moved about, go with any type still), `draws` (dropout is one mask of the whole
value) and `losses` (where backward may start).
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import placements.testing.laws.moves as moves
from placements import assert_type, transitions, type_of
from placements.duals import dual
from placements.errors import PlacementError
from placements.extents import Even
from placements.meaning import join, split
from placements.mesh import Mesh, set_current_mesh
from placements.ops import OPS, SUM
from placements.propagate import typecheck
from placements.state import shared_generator
from placements.tags import put
from placements.tensor_type import make
from placements.testing import strategies
from placements.testing.cases import Call, calls
from placements.testing.laws import round_trips, tight
from placements.testing.laws.comparison import Tally, tensors_in
from placements.testing.laws.placed_calls import InvalidCallError, PlacedCall, placed_calls
from placements.testing.laws.programs import check_program, programs
from placements.testing.laws.sound import check_forgetting, check_sound, require_accepted
from placements.testing.placed import split_ranks
from placements.testing.strategies import seeded
from placements.types import AxisType, I, P, R, Shard, V
from tests.test_laws import test_moves, test_round_trips, test_rules

Law = Callable[[str], None]

# A killer: the name of a law in LAWS, and what to try it on (an op, a row, or "").
Killer = tuple[str, str]

# Examples of each law for one mutant.
EXAMPLES = {"sound": 60, "moves": 25, "programs": 40, "extents": 250, "sums": 60}


def examples(kind: str, times: int = 1) -> settings:
    """No database, no shrinking: the first failure is enough."""
    return settings(
        max_examples=EXAMPLES[kind] * times,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def sound(argument: str) -> None:
    """Accepted calls of one op equal one device; some are accepted.

    "add" has the usual number of examples, "add 5" has five times as many.
    """
    name, _, factor = argument.partition(" ")
    tally = Tally()

    def law(placed: PlacedCall) -> None:
        if check_sound(placed, tally):
            check_forgetting(placed)

    for times in (int(factor or 1), 3 * int(factor or 1)):
        examples("sound", times)(given(placed_calls(name=name))(law))()
        if tally.letters & set("SPR") or not tally.operands:
            break
    require_accepted(name, tally)


# Whether values refute a cell does not depend on the tables.
refuted = functools.cache(tight.is_refuted)

CELL_LAWS = (
    test_rules.test_every_cell_gives_a_type_or_a_reason,
    test_rules.test_every_rule_is_reached,
    test_rules.test_the_order_of_operands_does_not_matter,
    test_rules.test_grouping_does_not_matter_for_sums,
    test_rules.test_forgetting_pieces_rejects_nothing_that_was_accepted,
    test_rules.test_every_refusal_says_why_it_is_one,
    test_rules.test_every_unsound_cell_has_values_that_no_type_fits,
    test_rules.test_accepted_cells_are_not_refuted,
)


def cells(_: str) -> None:
    """Total and tight, over all cells of the table of rules."""
    test_rules.is_refuted = refuted
    for law in CELL_LAWS:
        law()


def refused_along(name: str) -> None:
    """An op that refuses a cut dim has values for which no type is right."""
    op = OPS[name]
    if not op.along or op.along == SUM or op.group not in ("reductions", "along a dim"):
        return  # the law is about ops of one operand
    test_rules.test_a_cut_dim_that_is_refused_has_no_right_type(name)


# Ops that refuse a sum that would be right, known and accepted as such.
STRICT: dict[str, str] = {
    "fill": "a value that overwrites a sum must itself be pending it",
    "copy_": "the target's old values do not matter, so it may be refused with any",
    "nansum": "linear but for NaN, which the drawn numbers are not",
    "scaled_dot_product_attention": "linear in the values, but one class for all operands",
    "rms_norm": "linear in the weight, but one class for all operands",
    "cross_entropy": "linear in a target of probabilities, but one class for all operands",
    "nll_loss": "linear in the input, but shares the row of cross_entropy",
    "scatter_reduce": "linear if it reduces by sum, but one class for all reductions",
}


def refused_ops(name: str) -> None:
    """An op that refuses all sums has values for which no type is right."""
    if name in STRICT:
        return
    # how many operands, and those that are sums -> accepted, or shown wrong
    patterns: dict[tuple[int, tuple[int, ...]], bool] = {}

    def law(call: Call) -> None:
        floats = tuple(k for k, x in enumerate(call.operands) if x.has_gradient)
        if call.drawn or not floats:
            return
        for partial in {floats, *((k,) for k in floats)}:
            key = len(call.operands), partial
            if not patterns.get(key):
                verdict = _judge(call, partial)
                if verdict is not None:
                    patterns[key] = verdict

    examples("sums")(given(calls(name=name))(law))()
    strict = [partial for partial, shown in patterns.items() if not shown]
    assert not strict, f"{name}: sums in {strict} are refused, and nothing shows them wrong"


def numbers(name: str) -> None:
    """One number, given a shape, stays one in some calls of an op that moves elements."""
    mesh, kept = Mesh({"tp": 2}), 0

    def law(call: Call) -> None:
        nonlocal kept
        if len(call.operands) != 1 or not call.operands[0].has_gradient:
            return
        with set_current_mesh(mesh), typecheck():
            x = torch.full(call.operands[0].shape, 2.0, dtype=torch.float64)
            try:
                found = type_of(tensors_in(call.run(x))[0])
            except (PlacementError, RuntimeError, IndexError, ValueError):
                return
        kept += found is not None and found.is_number

    examples("sums")(given(calls(name=name))(law))()
    assert kept, f"{name}: a number given a shape becomes Replicate"


def _judge(call: Call, partial: Sequence[int]) -> bool | None:
    """True if accepted, or refused and shown wrong; None if nothing was learned."""
    mesh = Mesh({"tp": 2})
    types = [
        [
            make(mesh.seen_from(c), {"tp": P if k in partial else R})
            for c in mesh.coordinates()
        ]
        for k in range(len(call.operands))
    ]
    possible: set[str] | None = None
    for seed in range(4):
        placed = PlacedCall(call, mesh, types, seed, False, ())
        try:
            held = [_halved(h, k in partial) for k, h in enumerate(placed.locals())]
        except InvalidCallError:
            return None
        if _is_accepted(placed, held):
            return True
        whole = [h[0] + h[1] if k in partial else h[0] for k, h in enumerate(held)]
        try:
            wanted = tensors_in(call.run(*whole))[0]
            found = [tensors_in(call.run(*(h[r] for h in held)))[0] for r in range(2)]
        except (RuntimeError, IndexError, ValueError):
            return None
        if not wanted.numel():
            return None
        right = {
            name
            for name, value in tight._joins(found)
            if value.shape == wanted.shape and torch.allclose(value, wanted, equal_nan=True)
        }
        possible = right if possible is None else possible & right
    return not possible


def _halved(held: Sequence[Tensor], is_sum: bool) -> list[Tensor]:
    """Halves show what whole numbers hide, and a zero divisor would show too much."""
    if is_sum:
        return [x / 2 for x in held]
    return [x + (x == 0) if x.is_floating_point() else x for x in held]


def _is_accepted(placed: PlacedCall, held: Sequence[Sequence[Tensor]]) -> bool:
    for r, place in enumerate(placed.mesh.coordinates()):
        inputs = [h[r].clone() for h in held]
        with set_current_mesh(placed.mesh.seen_from(place)), typecheck():
            for x, types in zip(inputs, placed.types, strict=True):
                put(x, types[r])
            try:
                with shared_generator():
                    placed.call.run(*inputs)
            except (PlacementError, RuntimeError, IndexError, ValueError):
                return False
    return True


def draws(name: str) -> None:
    """Dropout drops the same elements of the whole value, in values and gradients.

    Where it is refused, no type may be right; the rows of DRAWS that refuse what is
    merely correlated (V and S with a shared generator) are policy and left out.
    """
    mesh, whole = Mesh({"tp": 2}), torch.arange(1.0, 33.0).double()
    sources = {"R": R, "I": I, "P": P, "S": Shard(0, Even(32, 2)), "V": V}
    for (letter, src), shared in product(sources.items(), ((), ("tp",))):
        if letter in "VS" and shared:
            continue
        held = split_ranks(
            lambda _: whole,
            [make(mesh.seen_from(c), {"tp": src}) for c in mesh.coordinates()],
            mesh,
            seeded(0),
        )
        runs = [_dropped(mesh, r, held[r], src, shared) for r in range(2)]
        known = runs[0][2]
        if known is not None:
            fits = (
                letter == "V" or known.letter == "V" or _is_masked(runs, src, known, whole)
            )
            assert fits, f"dropout of {letter}, shared={shared}: wrong as {known!r}"
        else:
            right = [t for t in sources.values() if _is_masked(runs, src, t, whole)]
            assert letter in "IP" and not right, f"{letter}, {shared}: refused, yet {right}"


Dropped = tuple[Tensor, Tensor, AxisType | None]


def _dropped(
    mesh: Mesh, rank: int, held: Tensor, src: AxisType, shared: tuple[str, ...]
) -> Dropped:
    x = held.clone().requires_grad_()
    torch.default_generator.manual_seed(1 if shared else 1 + rank)
    known = None
    with set_current_mesh(mesh.seen_from({"tp": rank})), typecheck():
        assert_type(x, {"tp": src})
        try:
            with shared_generator(*shared):
                y = torch.nn.functional.dropout(x)
                found = type_of(y)
                known = found["tp"] if found is not None else None
        except PlacementError:
            pass
    if known is None:
        y = torch.nn.functional.dropout(x)
    return x, y, known


def _is_masked(
    runs: Sequence[Dropped], src: AxisType, dst: AxisType, whole: Tensor
) -> bool:
    """Whether the ranks' results, read as `dst`, are the value times one mask."""
    sizes = {"tp": len(runs)}
    try:
        joined = join([y.detach() for _, y, _ in runs], {"tp": dst}, sizes)
        if joined.shape != whole.shape:
            return False
        mask = joined / whole
        weights = split(torch.ones_like(whole), {"tp": dual(dst)}, Mesh(sizes))
        grads = [
            torch.autograd.grad(y, x, w, retain_graph=True)[0]
            for (x, y, _), w in zip(runs, weights, strict=True)
        ]
        gradient = join(grads, {"tp": dual(src)}, sizes)
    except (ValueError, RuntimeError):
        return False
    return set(mask.tolist()) <= {0.0, 2.0} and torch.equal(gradient, mask)


def losses(_: str) -> None:
    """Backward may start at a loss exactly if its gradient is that of one device.

    Varying and pieces are left out: there is no loss on one device to compare with.
    """
    mesh, whole = Mesh({"tp": 2}), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    for letter, src in {"R": R, "I": I, "P": Shard(0, Even(4, 2))}.items():
        accepted, grads = True, []
        for place in mesh.coordinates():
            x = split(whole, {"tp": src}, mesh)[place["tp"]].clone().requires_grad_()
            x.square().sum().backward()
            grads.append(x.grad)
            y = x.detach().clone().requires_grad_()
            with set_current_mesh(mesh.seen_from(place)), typecheck():
                assert_type(y, {"tp": src})
                loss = y.square().sum()
                found = type_of(loss)
                assert found is not None and found["tp"].letter == letter, letter
                try:
                    loss.backward()
                except PlacementError:
                    accepted = False
        try:
            joined = join(grads, {"tp": dual(src)}, {"tp": 2})
            right = torch.equal(joined, 2 * whole)
        except ValueError:
            right = False
        assert accepted == right, f"a loss that is {letter}: accepted {accepted}"


def move(number: str) -> None:
    """One row of the table of transitions keeps the value; backward is the adjoint."""
    row = transitions.TRANSITIONS[int(number)]
    examples("moves")(given(moves.move_cases(row=row))(moves.check_transition))()


def duality(_: str) -> None:
    """The gradient of the gradient, and the backward of the backward."""
    test_moves.test_the_gradient_of_the_gradient_is_the_value()
    for row in transitions.TRANSITIONS:
        test_moves.test_the_backward_of_the_backward_is_the_forward(row)


def extents(_: str) -> None:
    """Rows there and back, scaling, splitting and joining."""
    bound = test_round_trips.bound_extents
    options = examples("extents")
    examples("extents", 4)(given(bound)(round_trips.check_rows))()
    options(given(bound, st.integers(1, 3))(round_trips.check_scaled))()
    placed = strategies.meshes().flatmap(
        lambda mesh: strategies.placed_tensors(mesh=mesh, letters="RSPI")
    )
    options(given(placed)(round_trips.check_joined))()


def short_programs(_: str) -> None:
    """Short programs are refused, or equal one device; a quarter is accepted."""
    accepted: list[bool] = []

    def law(program: Any) -> None:
        accepted.append(check_program(program))

    examples("programs")(given(programs())(law))()
    assert sum(accepted) > len(accepted) // 4, "few programs are accepted"


def patient(killers: Sequence[Killer]) -> list[Killer]:
    """The same laws of ops with more examples, for a mutant that the first did not kill."""
    names = [name for law, name in killers if law == "sound" and " " not in name]
    return [("sound", f"{name} 4") for name in names[:2]]


LAWS: dict[str, Law] = {
    "cells": cells,
    "sound": sound,
    "refused along": refused_along,
    "refused ops": refused_ops,
    "numbers": numbers,
    "draws": draws,
    "losses": losses,
    "moves": move,
    "duality": duality,
    "extents": extents,
    "programs": short_programs,
}


def first_failure(killers: Sequence[Killer]) -> tuple[Killer, str] | None:
    """The first law that fails, and the first line it says; None if all hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, argument in killers:
            try:
                LAWS[name](argument)
            except (Exception, pytest.fail.Exception) as error:
                first = str(error).partition("\n")[0] or type(error).__name__
                return (name, argument), first
    return None
