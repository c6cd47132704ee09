"""The laws that are tried on a mutant, by name and argument, with bounded examples.

They are the laws of `placements.testing.laws`, derandomised and without shrinking: a
mutant is dead at the first AssertionError.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import placements.testing.laws.transitions_kept as moves
from placements.inference import transitions
from placements.testing import strategies
from placements.testing.cases import OpCall, calls
from placements.testing.laws import round_trips, tight
from placements.testing.laws.comparison import Tally
from placements.testing.laws.decided import SEVERAL_ROWS, check_decided
from placements.testing.laws.draws import check_draw
from placements.testing.laws.loss_types import check_loss
from placements.testing.laws.padding_ignored import PaddedCall, check_padding, padded_calls
from placements.testing.laws.placed_calls import PlacedCall, placed_calls
from placements.testing.laws.short_programs import check_program, programs
from placements.testing.laws.sound import check_forgetting, check_sound, require_accepted
from tests.laws import (
    test_kept_numbers,
    test_moves,
    test_padding,
    test_round_trips,
    test_rules,
    test_sound,
)
from tests.mutants.known_forms import check_known, forms_of, known
from tests.placements.checker import test_call_as_people_write_it
from tests.placements.inference.flows import test_recurrent

Law = Callable[[str], None]

# A killer: the name of a law in LAWS, and what to try it on (an op, a row, or "").
Killer = tuple[str, str]

# Examples of each law for one mutant.
EXAMPLES = {
    "sound": 60, "moves": 25, "programs": 40, "extents": 250, "decided": 10, "numbers": 60,
    "padding": 150,
}  # fmt: skip


# Forms of an op that are tried before the mutant is given up for a patient one.
FORMS = 100


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


# What values show of a cell does not depend on the tables.
refuted = functools.cache(tight.is_refuted)
right = functools.cache(tight.right_types)

CELL_LAWS = (
    test_rules.test_every_cell_gives_a_type_or_a_reason,
    test_rules.test_every_rule_is_reached,
    test_rules.test_the_order_of_operands_does_not_matter,
    test_rules.test_grouping_does_not_matter_for_sums,
    test_rules.test_forgetting_pieces_rejects_nothing_that_was_accepted,
    test_rules.test_every_refusal_says_why_it_is_one,
    test_rules.test_every_refused_cell_has_values_that_no_type_fits,
    test_rules.test_the_type_that_a_cell_gives_is_right,
    test_rules.test_nothing_varying_comes_of_what_is_not,
)


def cells(_: str) -> None:
    """Total and tight, over all cells of the table of rules."""
    test_rules.is_refuted, test_rules.right_types = refuted, right
    for law in CELL_LAWS:
        law()


def decided(argument: str) -> None:
    """Combinations of types on one axis are accepted and sound, or refused and refuted.

    "add" has the usual number of examples, "add 5" has five times as many.
    """
    name, _, factor = argument.partition(" ")
    held: set[str] = set()

    def law(call: OpCall) -> None:
        form = f"{call.text} {[given.shape for given in call.operands]}"
        if form not in held:
            check_decided(call, most=48)
            held.add(form)

    options = examples("decided", int(factor or 1))
    options(given(calls(name=name, sizes=SEVERAL_ROWS))(law))()


def other_rows(_: str) -> None:
    """Pieces of the same sizes that hold other rows are not combined."""
    for case in range(len(test_sound.OTHER_ROWS)):
        test_sound.test_pieces_of_other_rows_are_not_combined(case)


def numbers(name: str) -> None:
    """One number, given a shape, stays one in some calls of an op that moves elements."""
    test_kept_numbers.check_some_kept(name, examples("numbers"))


def draws(argument: str) -> None:
    """Dropout of a value of that letter, its generator shared or not."""
    letter, _, shared = argument.partition(" ")
    check_draw(letter, shared == "True")


def move(number: str) -> None:
    """One row of the table of transitions keeps the value; backward is the adjoint."""
    row = transitions.TRANSITIONS[int(number)]
    examples("moves")(given(moves.transition_cases(row=row))(moves.check_transition))()


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


def padding(argument: str) -> None:
    """Nothing that counts depends on rows of padding in calls of one op."""
    name, _, factor = argument.partition(" ")
    options = examples("padding", int(factor or 1))

    def law(padded: PaddedCall) -> None:
        check_padding(padded)

    options(given(padded_calls(name=name))(law))()


# Ops of torch -> the layers that call them.
LAYERS = {"lstm": "LSTM", "gru": "GRU", "rnn_tanh": "RNN", "rnn_relu": "RNN of relu"}


def layers(name: str) -> None:
    """Recurrent layers on pieces, of packed sequences, and with settings of one rank."""
    for kind in test_recurrent.KINDS:
        test_recurrent.test_a_layer_on_pieces_is_that_of_one_device(
            LAYERS[name], kind, True
        )
    for packed in (False, True):
        test_recurrent.test_a_setting_is_that_of_all_ranks(name, packed)


def ends_of_bins(name: str) -> None:
    """A call is not taken for the one before, which had bins of other ends."""
    assert name == "histc", name
    test_call_as_people_write_it.test_the_memo_keeps_calls_apart()


def prepare(killer: Killer) -> None:
    """Ask the tables as they are for what the law compares with."""
    law, argument = killer
    if law == "forms":
        known(argument)


def patient(killers: Sequence[Killer]) -> list[Killer]:
    """The same laws of ops with more examples, for a mutant that the first did not kill."""
    names = ("sound", "decided", "padding")
    laws = [k for k in killers if k[0] in names and " " not in k[1]]
    about = dict.fromkeys(tuple(k[1].split()[:2]) for k in killers if k[0] == "forms")
    forms = [forms_of(op, slots, FORMS, 4 * FORMS) for op, slots in about]
    return [*forms, *((law, f"{name} 4") for law, name in laws[:4])]


LAWS: dict[str, Law] = {
    "cells": cells,
    "sound": sound,
    "decided": decided,
    "other rows": other_rows,
    "numbers": numbers,
    "draws": draws,
    "losses": check_loss,
    "moves": move,
    "duality": duality,
    "extents": extents,
    "programs": short_programs,
    "padding": padding,
    "layers": layers,
    "bools": test_padding.test_what_an_op_makes_of_a_false_row_of_padding,
    "counts": test_sound.test_a_count_of_own_rows_may_be_compared_with_zero,
    "ends of bins": ends_of_bins,
    "shared draws": test_recurrent.test_states_are_dropped_alike_only_if_draws_are_shared,
    "forms": check_known,
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
