"""`spmd-moe check --compare-meshes`: what is listed, in which order, with which numbers."""

import json
from dataclasses import replace

import pytest
import torch

from placements.runtime.ledger import Entry
from spmd_moe import Parallel
from spmd_moe.checks.meshes import Candidate, best_first, compare, feasible, on_wire
from spmd_moe.checks.presets import PRESETS
from spmd_moe.checks.scale import divisors, least_factor
from spmd_moe.checks.trace import Memory, Workload
from spmd_moe.cli.main import main

TINY = PRESETS["tiny"].config
WORK = Workload(batch=1, seq_len=8, dtype=torch.float32)


def test_every_feasible_mesh_is_there_once() -> None:
    found = feasible(TINY, 4, cp=1)
    assert len(set(found)) == len(found)
    assert {(p.tp, p.ep, p.etp) for p in found} == {
        (1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 2, 1), (2, 4, 1), (2, 2, 2),
        (4, 1, 1), (4, 2, 1), (4, 4, 1),
    }  # fmt: skip
    assert all(p.num_ranks == 4 for p in found)
    assert not any(p.sequence_parallel for p in found if p.tp == 1)
    assert all(8 % p.ep == 0 for p in feasible(TINY, 12, cp=3))
    assert all(p.cp == 3 for p in feasible(TINY, 12, cp=3))


def test_degrees_that_do_not_divide_the_layer_are_left_out() -> None:
    odd = replace(TINY, num_experts=6, hidden_dim=9, num_shared_experts=0)
    assert {(p.tp, p.ep, p.etp) for p in feasible(odd, 4, cp=1)} == {
        (1, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-reduce", 150), ("reduce-scatter", 75), ("all-to-all", 75), ("all-gather", 300)],
)
def test_bytes_on_the_wire(kind: str, sent: float) -> None:
    assert on_wire(Entry("tp", kind, 100, "float32", "here"), 4) == sent


def test_meshes_change_bytes_and_memory_as_they_should() -> None:
    by_mesh = {c.parallel: c for c in compare(TINY, feasible(TINY, 4, cp=1), WORK)}
    plain = by_mesh[Parallel(dp=4)]
    assert plain.forward == plain.backward == 0 < plain.gradient_sums
    ep = by_mesh[Parallel(dp=4, ep=4)]
    assert ep.memory.parameters < plain.memory.parameters / 2
    assert ep.forward > 0 and ep.gradient_sums < plain.gradient_sums
    tp = by_mesh[Parallel(dp=2, tp=2)]
    sp = by_mesh[Parallel(dp=2, tp=2, sequence_parallel=True)]
    assert tp.memory.parameters == sp.memory.parameters < plain.memory.parameters
    assert tp.forward == sp.forward  # an all-reduce is a reduce-scatter and an all-gather


def test_the_table_is_sorted_and_says_what_is_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--compare-meshes", "--ranks", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    totals = [mesh["memory"]["total"] for mesh in report["meshes"]]
    assert totals == sorted(totals) and len(totals) == len(feasible(TINY, 4, cp=1))
    assert main(["check", "--compare-meshes", "--ranks", "2", "--preset", "qwen3-moe"]) == 0
    out = capsys.readouterr().out
    assert "autograd keeps" in " ".join(out.split())


def candidate(dp: int, memory: int, *sent: float) -> Candidate:
    return Candidate(Parallel(dp=dp), *sent, Memory(0, 0, 0, memory))


def test_least_memory_then_least_sent_comes_first() -> None:
    given = [
        candidate(1, 30, 0, 0, 0), candidate(2, 20, 1, 1, 3), candidate(3, 10, 9, 9, 9),
        candidate(4, 20, 0, 4, 0),
    ]  # fmt: skip
    assert [one.parallel.dp for one in best_first(given)] == [3, 4, 2, 1]


def test_divisors() -> None:
    for n in range(1, 200):
        assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
    assert [least_factor(n) for n in (1, 2, 9, 35, 999999937)] == [1, 2, 3, 5, 999999937]


def test_cp_is_taken_from_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["check", "--compare-meshes", "--ranks", "4", "--mesh", "cp=2", "--json"]) == 0
    )
    meshes = json.loads(capsys.readouterr().out)["meshes"]
    assert {mesh["parallel"]["cp"] for mesh in meshes} == {2}
    assert main(["check", "--compare-meshes", "--ranks", "4", "--mesh", "cp=2"]) == 0
    assert " meshes of 4 ranks with cp=2, least memory first" in capsys.readouterr().out
