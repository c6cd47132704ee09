"""What the peers say of the bugs is measured, about the bug, and counted as it was said."""

import inspect
import re
from collections import Counter
from types import FunctionType
from typing import Any

import pytest
import torch

from placements import typecheck
from placements.interop.engines import Engine
from spmd_moe.bugs.catalogue import BUGS
from spmd_moe.bugs.findings import Finding, summary
from spmd_moe.bugs.measure import error_under
from spmd_moe.bugs.peers.opinions import (
    ACCEPTED,
    BOTH,
    HARMLESS,
    NOT_WRITTEN,
    REFUSED,
    Opinion,
    SameWords,
    opinion_of,
    peers,
)
from spmd_moe.bugs.peers.written import BY_ID, UNWRITTEN, UNWRITTEN_IN
from spmd_moe.bugs.record import TYPES, Bug

pytest.importorskip("spmd_types")

LOCAL, GLOBAL, DTENSOR = "spmd_types local", "spmd_types global", "DTensor"
BY_BUG_ID = {bug.id: bug for bug in BUGS}
# Our types want a word of ours in the right program: a reinterpret to or from a Shard
# (B24, B58), an index domain (B35), the sizes of the pieces (B47).
NEEDS_OUR_WORDS = {"B24", "B35", "B47", "B58"}

Opinions = dict[str, dict[str, Opinion]]


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    return peers()


@pytest.fixture(scope="module")
def opinions(engines: dict[str, Engine]) -> Opinions:
    return {
        bug.id: {name: opinion_of(engine, bug) for name, engine in engines.items()}
        for bug in BUGS
    }


@pytest.fixture(scope="module")
def same_words() -> dict[str, Opinion]:
    return {bug.id: opinion_of(SameWords(), bug) for bug in BUGS}


def test_the_counts_are_those_of_the_run(
    opinions: Opinions, same_words: dict[str, Opinion]
) -> None:
    findings = [
        Finding(bug, TYPES, "", True, opinions[bug.id], same_words[bug.id]) for bug in BUGS
    ]
    wrong = [bug.id for bug in BUGS if bug.refused is not None]
    lines = summary(findings)[2:]
    asked = [[opinions[id][name] for id in wrong] for name in (LOCAL, GLOBAL, DTENSOR)]
    asked.append([same_words[id] for id in wrong])
    assert len(lines) == len(asked)
    for line, said in zip(lines, asked, strict=True):
        count = Counter(opinion.verdict for opinion in said)
        written, total = map(int, re.findall(r": (\d+) of (\d+) can be", line)[0])
        assert (written, total) == (total - count[NOT_WRITTEN], len(wrong))
        told = {verdict: int(n) for verdict, n in re.findall(r"([a-z ]+) (\d+)[,.]", line)}
        told = {verdict.strip(): n for verdict, n in told.items() if n}
        assert told == {v: n for v, n in count.items() if v != NOT_WRITTEN}
        assert sum(told.values()) == written


@pytest.mark.parametrize(
    ("id", "name", "verdict", "says"),
    [
        ("B01", LOCAL, REFUSED, "Invariant type on axis"),
        ("B15", LOCAL, REFUSED, "backward() on a Replicate loss"),
        ("B60", LOCAL, REFUSED, "all_gather: expected input type"),
        ("B19", LOCAL, ACCEPTED, "y_ECD"),
        ("B19", GLOBAL, REFUSED, "Partial type on axis"),
        ("B35", LOCAL, ACCEPTED, "y_TD"),
        ("B53", LOCAL, ACCEPTED, "ranks [2] returned"),
        ("B49", LOCAL, ACCEPTED, "as it must"),
        ("B01", DTENSOR, ACCEPTED, "gate.grad"),
        ("B22", DTENSOR, REFUSED, "Implicit redistribution"),
        ("B76", DTENSOR, NOT_WRITTEN, "checkpoints"),
    ],
)
def test_verdicts_that_are_known(
    opinions: Opinions, id: str, name: str, verdict: str, says: str
) -> None:
    found = opinions[id][name]
    assert found.verdict == verdict, found
    assert says in found.why, found


def test_every_verdict_has_its_reason(opinions: Opinions) -> None:
    for id, said in opinions.items():
        for name, opinion in said.items():
            assert opinion.why, (id, name)
            if opinion.verdict == REFUSED:
                assert re.match(r"\w+Error: .{20}", opinion.why), (id, name, opinion)


def test_what_is_not_written_is_so_for_a_reason_given(opinions: Opinions) -> None:
    """No program fails by itself, and no word of ours is left in one."""
    for id, said in opinions.items():
        for name, opinion in said.items():
            if opinion.verdict == NOT_WRITTEN:
                assert id in UNWRITTEN or (id, name) in UNWRITTEN_IN, (id, name, opinion)


def test_every_bug_is_there_and_every_fix_passes(opinions: Opinions) -> None:
    for id, said in opinions.items():
        for name, opinion in said.items():
            assert opinion.verdict not in (HARMLESS, BOTH), (id, name, opinion)


@pytest.mark.parametrize(
    "id", [id for id in BY_ID if hasattr(BY_ID[id], "right_for_peers")]
)
def test_programs_for_peers_under_our_types(
    id: str, same_words: dict[str, Opinion]
) -> None:
    """The right one passes; the wrong one is refused, or its results are wrong."""
    found = same_words[id]
    if id in NEEDS_OUR_WORDS:
        assert found.verdict == BOTH, found
    else:
        assert found.verdict in (REFUSED, ACCEPTED), found
        right = BY_ID[id].right_for_peers
        assert error_under(typecheck, BY_BUG_ID[id], right) is None


def test_programs_are_of_bugs_and_come_in_pairs() -> None:
    assert set(BY_ID) <= set(BY_BUG_ID)
    assert not set(BY_ID) & set(UNWRITTEN)
    for id, programs in BY_ID.items():
        for suffix in ("peers", "dtensor"):
            wrong = hasattr(programs, f"wrong_for_{suffix}")
            right = hasattr(programs, f"right_for_{suffix}")
            must_accept = BY_BUG_ID[id].refused is None
            assert right == (wrong or (must_accept and right)), (id, suffix)


class Fake:
    """Programs that no peer can say anything sensible about."""

    @staticmethod
    def wrong() -> dict[str, Any]:
        return {"x": torch.zeros(2)}

    @staticmethod
    def right() -> dict[str, Any]:
        return {"x": torch.zeros(2)}


class Crash(Fake):
    @staticmethod
    def wrong() -> dict[str, Any]:
        return {"x": torch.zeros(2)[5]}


def of(programs: type[Any]) -> Bug:
    return Bug("B0", "none", "C1", "none", {"tp": 2}, BUGS[0].refused, {}, programs)


@pytest.mark.parametrize("name", [LOCAL, GLOBAL, DTENSOR])
def test_a_harmless_program_and_a_crash_are_no_verdicts(
    engines: dict[str, Engine], name: str
) -> None:
    assert opinion_of(engines[name], of(Fake)).verdict == HARMLESS
    crash = opinion_of(engines[name], of(Crash))
    assert crash.verdict == NOT_WRITTEN and "checked or not: IndexError" in crash.why


def test_torch_is_left_as_it_was(engines: dict[str, Engine]) -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    backward = inspect.getattr_static(torch.Tensor, "backward")
    for engine in engines.values():
        opinion_of(engine, BY_BUG_ID["B02"])
        assert torch.autograd.Function.__dict__["apply"] is apply
        assert inspect.getattr_static(torch.Tensor, "backward") is backward
    assert isinstance(backward, FunctionType)
