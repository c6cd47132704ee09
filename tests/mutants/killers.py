"""The laws that are tried on a mutant, by name and argument, with bounded examples.

They are the laws of `placements.testing.laws`, derandomised and without shrinking: a
mutant is dead at the first AssertionError. `refused ops` is the one law that lives here:
an op that refuses every Partial operand must have values for which no type is right.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

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
from placements.types import I, P, R, Shard
from tests.test_laws import test_moves, test_round_trips, test_rules

Law = Callable[[str], None]

# A killer: the name of a law in LAWS, and what to try it on (an op, a row, or "").
Killer = tuple[str, str]

# Examples of each law for one mutant.
EXAMPLES = {"sound": 60, "moves": 25, "programs": 40, "extents": 150, "sums": 60}


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


def sound(name: str) -> None:
    """Accepted calls of one op equal one device; some are accepted."""
    tally = Tally()

    def law(placed: PlacedCall) -> None:
        if check_sound(placed, tally):
            check_forgetting(placed)

    for times in (1, 3):
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
    if not op.along or op.along == SUM:
        return
    test_rules.test_a_cut_dim_that_is_refused_has_no_right_type(name)


# Ops that refuse a sum that would be right, known and accepted as such.
STRICT: dict[str, str] = {
    "fill": "a value that overwrites a sum must itself be pending it",
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
    patterns: dict[tuple[int, ...], bool] = {}  # operands that are sums -> shown wrong

    def law(call: Call) -> None:
        floats = tuple(k for k, x in enumerate(call.operands) if x.has_gradient)
        if call.drawn or call.reference is not None or not floats:
            return
        for partial in {floats, *((k,) for k in floats)}:
            shown = patterns.get(partial)
            if shown is None or not shown:
                verdict = _judge(call, partial)
                if verdict is not None:
                    patterns[partial] = bool(shown) or verdict

    examples("sums")(given(calls(name=name))(law))()
    strict = [partial for partial, shown in patterns.items() if not shown]
    assert not strict, f"{name}: sums in {strict} are refused, and nothing shows them wrong"


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
    """Halves show what whole numbers hide: rounding is not linear."""
    return [x / 2 if is_sum else x for x in held]


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
            with set_current_mesh(mesh.seen_from(place)), typecheck():
                y = assert_type(x.detach().clone().requires_grad_(), {"tp": src})
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
    options(given(bound)(round_trips.check_rows))()
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


LAWS: dict[str, Law] = {
    "cells": cells,
    "sound": sound,
    "refused along": refused_along,
    "refused ops": refused_ops,
    "losses": losses,
    "moves": move,
    "duality": duality,
    "extents": extents,
    "programs": short_programs,
}


def killer_of(killers: Sequence[Killer]) -> tuple[str, str] | None:
    """The first law that fails, and its first line; None if all hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, argument in killers:
            try:
                LAWS[name](argument)
            except Exception as error:  # a law that cannot run reports it too
                first = str(error).partition("\n")[0] or type(error).__name__
                return f"{name} {argument}".strip(), first
    return None
