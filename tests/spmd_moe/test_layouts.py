"""The table is complete, the code obeys it, and the collectives are those it implies."""

import gc
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from placements import (
    NotWaitedWarning,
    PlacementError,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import RankFailure
from placements.types.axis import BY_LETTER, Shard
from spmd_moe import MoE, Parallel, layouts
from spmd_moe.cli.layouts_page import markdown
from spmd_moe.layouts import CONFIGURATIONS, TABLE, Layout, Row, configuration, layout
from tests.support.moe import CONFIG, PARALLELS, Case, assert_equals_one_device, on_ranks

BY_NAME = {
    "C1": Parallel(dp=2, tp=2, ep=2, sequence_parallel=True),
    "C2": Parallel(dp=2, tp=2, ep=2),
    "C3": Parallel(dp=2, tp=2, sequence_parallel=True),
    "C4": Parallel(dp=2, tp=2),
    "C5": Parallel(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
    "C5 no SP": Parallel(dp=2, tp=2, ep=2, etp=2),
}


def test_every_configuration_has_a_parallel() -> None:
    assert {name: configuration(p) for name, p in BY_NAME.items()} == {
        name: name for name in CONFIGURATIONS
    }
    assert {configuration(p) for p in PARALLELS} == set(CONFIGURATIONS)


def test_every_cell_stands_below_its_configuration() -> None:
    lines = Path(layouts.__file__).read_text().splitlines()
    head = next(
        line for line in lines if line.lstrip().startswith("#    ") and " C2 " in line
    )
    starts = [head.index(f" {name}") + 1 for name in CONFIGURATIONS]
    rows = [line for line in lines if re.search(r'\b(tp|ep|etp)="(?=\S+ )', line)]
    assert len(rows) == sum(
        bool(getattr(row, a)) for row in TABLE for a in ("tp", "ep", "etp")
    )
    for line in rows:
        start = re.search(r'\b(?:tp|ep|etp)="', line)
        assert start is not None
        cells = line[start.end() : line.index('"', start.end())]
        assert [start.end() + m.start() for m in re.finditer(r"\S+", cells)] == starts, line


def test_a_row_with_a_cell_too_few_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="tokens"):
        Row("tokens", "x_TD", dp="S(0)", tp="S(0) S(0) R R R")


# seeds.md section 6, the cells on tp, in its order C1 C2 C3 C4 C5 C5-without-SP. Of rows 20
# and 23 ours keeps Partial in C3 and C5, so that one reduce-scatter serves both terms (6.1).
SEEDS: dict[str, str] = {
    "input": "S I S I S I",
    "entered": "S I R R R R",
    "tokens": "S S R R R R",
    "w_gate_ED": "R R R R R R",
    "routing": "S S R R R R",
    "expert_ids": "S S R R R R",
    "counts_E": "P P R R R R",
    "expert_bias_E": "R R R R R R",
    "slots": "V V R R R R",
    "collected": "V V P P P P",
    "combined": "S S P P P P",
    "shared_input": "R R R R R R",
    "shared_output": "P P P P P P",
    "added": "S P P P P P",
    "output": "S I S I S I",
}


@pytest.mark.parametrize("tensor", SEEDS)
def test_the_table_says_what_the_seeds_say(tensor: str) -> None:
    found = [getattr(layout(name), tensor)["tp"].letter for name in CONFIGURATIONS]
    assert " ".join(found) == SEEDS[tensor]


def run_on_sizes(moe: MoE, parallel: Parallel) -> Any:
    """One checked forward and backward in one process; nothing communicates."""
    length = 2 if parallel.sequence_parallel else 4
    x = torch.randn(2, length, 8, requires_grad=True)
    assert_type(x, moe.input_types(4))
    y = moe(x, seq_len=4)
    y.sum().backward()
    return y


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_output_is_placed_as_the_table_says(name: str) -> None:
    parallel = BY_NAME[name]
    with set_current_mesh(parallel.dense_mesh()), typecheck():
        y = run_on_sizes(MoE(CONFIG, parallel), parallel)
        wanted = {"dp": Shard(0), "tp": layout(name).output["tp"]}
        if parallel.sequence_parallel:
            wanted["tp"] = Shard(1)
        assert type_of(y) == wanted


def other_types(t: Any, start: int) -> list[Any]:
    """Two of the other types that a cell could say."""
    others: list[Any] = [o for o in BY_LETTER.values() if o != t]
    others += [] if isinstance(t, Shard) else [Shard(0)]
    return [others[start % len(others)], others[(start + 1) % len(others)]]


def mutants(name: str) -> Iterator[tuple[str, Layout]]:
    """The column with one cell changed, for every cell that these degrees can tell."""
    sizes = {**BY_NAME[name].dense_mesh(), **BY_NAME[name].sparse_mesh()}
    right = layout(name)
    for start, row in enumerate(TABLE):
        types = getattr(right, row.tensor)
        for axis in (axis for axis in types if sizes[axis] > 1):
            for other in other_types(types[axis], start):
                text = f"{row.tensor} {axis}: {types[axis]!r} -> {other!r}"
                yield text, replace(right, **{row.tensor: {**types, axis: other}})


def is_refused(parallel: Parallel) -> bool:
    with set_current_mesh(parallel.dense_mesh()), typecheck():
        try:
            run_on_sizes(MoE(CONFIG, parallel), parallel)
        except (PlacementError, ValueError, RuntimeError):
            return True
    return False


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_no_cell_of_the_table_can_be_wrong_unnoticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most wrong cells do not type-check; the rest claim what numbers or bytes deny."""
    parallel, by_types = BY_NAME[name], 0
    with warnings.catch_warnings():
        # An error may come while rows are under way, which then nobody waits for.
        warnings.simplefilter("ignore", NotWaitedWarning)
        for text, wrong in mutants(name):
            monkeypatch.setattr("spmd_moe.layer.layout", lambda _, wrong=wrong: wrong)
            if is_refused(parallel):
                by_types += 1
            else:
                assert is_noticed_on_ranks(name), text
        gc.collect()
    assert by_types > 35, by_types


def is_noticed_on_ranks(name: str) -> bool:
    try:
        for shared in (True, False):
            config = replace(CONFIG, num_shared_experts=int(shared))
            case = Case(BY_NAME[name], config, batch=1, seq_len=4)
            steps = on_ranks(case)
            assert_equals_one_device(case, steps)
            assert all(s.collectives == collectives_of(name, shared) for s in steps)
    except (AssertionError, RankFailure, ValueError):
        return True
    return False


def test_the_page_shows_every_tensor_and_configuration() -> None:
    page = markdown()
    head, _, *rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(name in head for name in CONFIGURATIONS)
    assert [row.split("`")[1] for row in rows] == [row.tensor for row in TABLE]
    widths = {len(row.replace("\\|", "").split("|")) for row in rows}
    assert widths == {len(head.split("|"))}


GATHER, SCATTER, SUM, EXCHANGE = (
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
)  # fmt: skip
# seeds.md 6.1: (axis, kind) -> how many, forward and backward, with shared experts.
COLLECTIVES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "C1": ({GATHER: 1, SCATTER: 1}, {SCATTER: 1, GATHER: 1}),
    "C2": ({SUM: 1}, {GATHER: 1, SUM: 1}),
    "C3": ({GATHER: 1, SCATTER: 1}, {GATHER: 1, SCATTER: 1}),
    "C4": ({SUM: 1}, {SUM: 1}),
    "C5": ({GATHER: 1, SCATTER: 1}, {GATHER: 1, SCATTER: 1}),
    "C5 no SP": ({SUM: 1}, {SUM: 1}),
}
# Without shared experts; what is not here is as above.
WITHOUT_SHARED: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "C1": ({}, {}),
    "C2": ({SUM: 1}, {GATHER: 1}),
}


def collectives_of(name: str, shared: bool = True) -> dict[tuple[str, str, bool], int]:
    forward, backward = COLLECTIVES[name]
    if not shared:
        forward, backward = WITHOUT_SHARED.get(name, (forward, backward))
    wanted = {("tp", kind, False): n for kind, n in forward.items()}
    wanted |= {("tp", kind, True): n for kind, n in backward.items()}
    if BY_NAME[name].ep > 1:
        wanted |= {("ep", EXCHANGE, False): 3, ("ep", EXCHANGE, True): 2}
    return wanted


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_the_collectives_are_those_of_the_seeds(
    name: str, shared: bool, before: bool
) -> None:
    """Exactly, on every rank, whatever the routing and even without tokens."""
    config = replace(CONFIG, num_shared_experts=int(shared), score_before_experts=before)
    for seq_len in (1, 5):
        for step in on_ranks(Case(BY_NAME[name], config, seq_len=seq_len)):
            assert step.collectives == collectives_of(name, shared)
