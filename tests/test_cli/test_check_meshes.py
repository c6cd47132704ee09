"""`spmd-moe check --compare-meshes`: what is listed, in which order, with which numbers."""

import json
from dataclasses import replace

import pytest
import torch

from placements.ledger import Entry
from spmd_moe import Parallel
from spmd_moe.cli.compare_meshes import best_first, compare, feasible, on_wire
from spmd_moe.cli.main import main
from spmd_moe.cli.presets import PRESETS
from spmd_moe.cli.trace import Workload

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
    assert on_wire(Entry("tp", kind, 100, "here"), 4) == sent


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
    assert "\u2026" not in out, "a number was cut off"
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100


def test_of_equal_memory_less_sent_comes_first() -> None:
    found = best_first(compare(TINY, feasible(TINY, 2, cp=1), WORK))
    keys = [(c.memory.total, c.sent) for c in found]
    assert keys == sorted(keys)
