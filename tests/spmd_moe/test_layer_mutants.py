"""One wrong line in the layer: which type refuses it, and what does where no type can.

The mutants of a Mixture-of-Experts forward that pass a checker which knows neither sizes
nor indices (wrong token index, scores not permuted, return splits swapped, counts or rows
exchanged over another axis, group sizes that are not the counts, gates not applied), and
others beside them. Each is tried under `typecheck()`, then `verify()`, then against the
one-device reference; the first that refuses is what the table says.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placements import PlacementError, assert_type, split, typecheck, verify
from placements.testing import RankFailure, run_ranks
from spmd_moe import AllToAllDispatcher, Parallel
from spmd_moe import combine as combine_function
from spmd_moe.dispatch import fill_slots
from spmd_moe.paths.agreement import ByExchange
from tests.support.moe import (
    CONFIG,
    Case,
    assert_equals_one_device,
    build,
    meshes,
    on_ranks,
)

# Two sequences in a batch, uneven pieces of each, several experts on a rank; and once an
# etp axis of two ranks, so that there is a wrong axis to exchange over.
EIGHT = replace(CONFIG, num_experts=8)
ETP = Case(Parallel(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True), EIGHT)
EP = Case(Parallel(dp=2, tp=2, ep=4, sequence_parallel=True), EIGHT)
BEFORE = replace(EP, config=replace(EIGHT, score_before_experts=True))
TYPES, VALUES, SIZES = "types", "verify", "sizes of a call"
SIMULATOR, REFERENCE = "simulator", "reference"


@dataclass(frozen=True)
class Mutant:
    """`old` in the source of `function` becomes `new`; `by` refuses, saying `says`."""

    name: str
    function: Callable[..., Any]
    old: str
    new: str
    by: str
    says: str
    case: Case = EP


MUTANTS = (
    Mutant(
        "token index by arithmetic", fill_slots,
        "token_of_slot_N[slots.order_N]", "slots.order_N % x_TD.shape[0]", TYPES,
        "token_of_slot_N is an index (computed by arithmetic)",
    ),
    Mutant(
        "slot index for a token index", fill_slots,
        "token_of_slot_N[slots.order_N]", "slots.order_N", TYPES, "unless the index counts this rank's own rows",
    ),
    Mutant(
        "token index of another order", fill_slots,
        ".repeat_interleave(choices)", ".repeat(choices)", REFERENCE, "y is not",
    ),
    Mutant(
        "scores not permuted", fill_slots,
        "own_rows(routing.gates_TK).flatten()[slots.order_N]",
        "own_rows(routing.gates_TK).flatten()", REFERENCE, "y is not", BEFORE,
    ),
    Mutant(
        "return splits swapped", AllToAllDispatcher.collect_start,
        "input_split_sizes=sends, output_split_sizes=receives",
        "input_split_sizes=receives, output_split_sizes=sends", SIZES, "sum to the",
    ),
    Mutant(
        "counts exchanged over another axis", ByExchange.start,
        'all_to_all_start(counts_WG, "ep"', 'all_to_all_start(counts_WG, "etp"', TYPES,
        "counts_WG is Replicate on axis 'etp'", ETP,
    ),
    Mutant(
        "counts exchanged over an axis of one rank", ByExchange.start,
        'all_to_all_start(counts_WG, "ep"', 'all_to_all_start(counts_WG, "etp"', SIMULATOR,
        "which expects",
    ),
    Mutant(
        "rows exchanged over another axis", AllToAllDispatcher.dispatch,
        'rows, "ep"', 'rows, "etp"', TYPES,
        "rows is Replicate on axis 'etp'", ETP,
    ),
    Mutant(
        "rows exchanged over an axis of one rank", AllToAllDispatcher.dispatch,
        'rows, "ep"', 'rows, "etp"', SIZES,
        "one entry for each of the 1 ranks",
    ),
    Mutant(
        "group sizes that are not the counts", AllToAllDispatcher.dispatch,
        "known = regrouping.counts_list", "known = [n + 1 for n in regrouping.counts_list]", SIZES, "but there are",
    ),
    Mutant(
        "rows not regrouped by expert", AllToAllDispatcher.dispatch,
        "regrouping.to_experts(rows_MD)", "rows_MD", REFERENCE, "y is not",
    ),
    Mutant(
        "the order of the slots for that of the rows", AllToAllDispatcher.collect_start,
        "plan.regrouping.to_senders(rows_MD)", "rows_MD.index_select(0, plan.slots.inverse_N)", TYPES, "expected a type on Mesh(edp=1",
    ),
    Mutant(
        "gates not applied", combine_function,
        "(gates @ rows_TKD).squeeze(1) if weigh else rows_TKD.sum(1)", "rows_TKD.sum(1)",
        VALUES, "'Router.w_gate_ED' got no gradient",
    ),
)  # fmt: skip


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The mutant in place of the function, in every module that has it."""
    original = mutant.function
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(mutant.old) == 1, f"{mutant.name}: the line is not there any more"
    scope: Any = sys.modules[original.__module__].__dict__
    known = dict(scope)
    exec(source.replace(mutant.old, mutant.new), known)
    wrong = known[original.__name__]
    owners: list[Any] = [
        module for name, module in sys.modules.items() if name.startswith("spmd_moe")
    ]
    owners += [AllToAllDispatcher, ByExchange]
    places = [o for o in owners if o.__dict__.get(original.__name__) is original]
    assert places
    for owner in places:
        setattr(owner, original.__name__, wrong)
    try:
        yield
    finally:
        for owner in places:
            setattr(owner, original.__name__, original)


def step(case: Case, mode: Callable[[], Any]) -> None:
    """A forward and a backward of the layer on this rank."""
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        held = [split(t, moe.layout.input, dense)[dist.get_rank()] for t in case.tensors()]
        with mode():
            types = moe.input_types(case.seq_len)
            x, weights = (assert_type(t, types) for t in held)
            (moe(x, seq_len=case.seq_len) * weights).sum().backward()


def refusal(case: Case) -> tuple[str, BaseException | None]:
    """Who refuses the layer as it is now, and how."""
    for mode, by in ((typecheck, TYPES), (verify, VALUES)):
        try:
            run_ranks(case.parallel.dense_mesh(), step, case, mode)
        except RankFailure as failure:
            cause = failure.cause
            if cause is None:
                return SIMULATOR, failure
            # A PlacementError that was made of an op's own error has that error as its cause.
            of_types = isinstance(cause, PlacementError) and cause.__cause__ is None
            return by if of_types else SIZES, cause
    try:
        assert_equals_one_device(case, on_ranks(case))
    except (AssertionError, RankFailure) as error:
        return REFERENCE, error
    return "nobody", None


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# What is refused while the counts are under way drops them, and says so.
@pytest.mark.filterwarnings("ignore::placements.NotWaitedWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_wrong_line_of_the_layer_is_refused(mutant: Mutant) -> None:
    with planted(mutant):
        by, error = refusal(mutant.case)
    assert by == mutant.by, error
    assert mutant.says in str(error), error


@pytest.mark.parametrize("case", (EP, ETP, BEFORE), ids=("ep", "etp", "before"))
def test_the_layer_as_it_is_passes_all_of_them(case: Case) -> None:
    assert refusal(case) == ("nobody", None)
