"""A few mutants of each table are killed, and leave nothing behind."""

import os
import signal

import pytest
import torch

from placements.inference.op import parsed_slots
from placements.inference.ops import OPS, ROWS
from placements.inference.rules import RULES
from tests.mutants import verdicts
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.killers import first_failure
from tests.mutants.mutant import Mutant
from tests.mutants.of_roles import ways_with
from tests.mutants.patches import changed
from tests.mutants.tables import mutants
from tests.mutants.verdicts import Verdict, try_mutant

EVERY = {mutant.name: mutant for mutant in mutants()}

# From each table some; the law that kills them is quick.
SOME = [
    "rules | 2 linear, has P, only PR | P -> R",
    "rules | 3 linear, has P, only VSRP | refused -> P",
    "rules | 10 any, has V, only VSR | V -> refused",
    "rules | 12 any, has -, only R | dropped",
    "dims | infer._agree_on_dim | the result is cut along the next dim",
    "dims | infer._contract | a sum -> equal on all ranks",
    "draws | R, own generator | V -> R",
    "duals | R | P -> R",
    "duals | S | S -> P",
    "losses | R | refused -> accepted",
    "losses | V | refused -> accepted",
    "draws | V, shared generator | refused -> V",
    "losses | P | accepted -> refused",
    "transitions | all_reduce P -> R | sum -> same",
    "transitions | convert S -> P | place -> gather",
    "backward | convert I -> R | sum -> same",
    "backward | Move.dual | sends are not exchanged",
    "extents | Padded.local_size | the padded length",
    "extents | Folded.to_global | the padded length",
    "ops | elementwise: abs ... | non-linear -> linear",
    "ops | reductions: sum | linear -> non-linear",
    "ops | reductions: mean | cut dim: refused -> a sum",
    "ops | views: pad | linear -> non-linear",
    "ops | scatters: index_add | cut dim: a sum -> refused",
    "columns | elementwise: abs ... | of zeros: zero wins",
    "columns | factories: zeros ... | takes no mesh",
    "roles | quotients: div ..., other | control -> flag",
    "roles | quotients: div ..., other | control -> unread",
    "roles | sums: add ..., alpha | flag -> unread",
    "roles | views: narrow, start | choice -> size",
    "roles | views: narrow, start | choice -> flag",
    "roles | factories: zeros ..., size | size -> flag",
    "roles | reductions: sum, keepdim | flag -> left out",
    "roles | gathers: __getitem__, idx | subscript -> choice",
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", SOME)
def test_a_mutant_is_killed(name: str) -> None:
    verdict = try_mutant(name)
    assert verdict.is_killed and not verdict.broken, verdict


def test_the_tables_as_they_are_pass() -> None:
    laws = [
        ("cells", ""),
        ("duality", ""),
        ("losses", "V"),
        ("extents", ""),
        ("moves", "0"),
    ]
    assert first_failure([*laws, ("sound", "mul"), ("decided", "mul")]) is None


def test_a_change_is_undone() -> None:
    before = dict(OPS), RULES
    for mutant in EVERY.values():
        with changed(mutant.apply):
            pass
    from placements.inference import rules

    assert (dict(OPS), rules.RULES) == before and rules.RULES is RULES


# What forms call otherwise than the binder: the subscript, and the arguments of einsum.
CALLED_OTHERWISE = {"__getitem__ idx", "__setitem__ v", "__setitem__ k", "einsum args"}


def test_every_slot_of_a_row_is_one_of_an_op_of_the_row() -> None:
    dead: set[str] = set()
    for row in ROWS:
        roles, others = parsed_slots(row.slots)
        unknown = [slot for slot in roles if not any(ways_with(row, slot, others))]
        dead |= {f"{row.names.split()[0]} {slot}" for slot in unknown}
    assert dead == CALLED_OTHERWISE


def test_a_crash_is_noticed_and_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def tried(name: str) -> Verdict:
        if name == SOME[1]:
            os.kill(os.getpid(), signal.SIGKILL)
        return Verdict(name, "rules", "", "", 0.0, ())

    monkeypatch.setattr(verdicts, "try_mutant", tried)
    found = verdicts.try_mutants(SOME[:3])
    assert [v.name for v in found] == SOME[:3]
    assert [v.killer for v in found] == ["", "crash", ""]


def test_every_reason_is_for_a_mutant() -> None:
    def fits(mutant: Mutant, start: str) -> bool:
        return mutant.name.startswith(start)

    assert [s for s in EQUIVALENT if not any(fits(m, s) for m in EVERY.values())] == []
