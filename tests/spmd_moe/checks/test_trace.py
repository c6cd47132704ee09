"""The ledger of a trace on meta tensors is what ranks really send, forward and backward."""

import io
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from placements import (
    Mesh,
    R,
    assert_type,
    ledger,
    reduce_gradients,
    set_current_mesh,
    split,
    typecheck,
)
from placements.runtime.describe import dtype_name
from placements.runtime.ledger import Entry
from placements.testing import device_mesh, run_ranks
from placements.testing.ranks.backend import SimGroup
from placements.testing.ranks.calls import SimCall
from placements.types.tensor import TensorType
from spmd_moe import MoE, MoEConfig, Parallel
from spmd_moe.checks.crossings import COLLECTIVE, Crossing
from spmd_moe.checks.trace import Trace, Workload, trace
from spmd_moe.cli.check_json import of_entries
from spmd_moe.cli.check_report import show_crossings
from spmd_moe.layouts import configuration
from tests.support.moe import PARALLELS

# Balanced routing: how many rows travel does not depend on the data. On every rank there
# are 16 slots or more, a multiple of the 4 experts.
CONFIG = MoEConfig(
    dim=8, hidden_dim=4, num_experts=4, top_k=2, num_shared_experts=1, round_robin=True
)
EVEN = Workload(batch=2, seq_len=16, dtype=torch.float32)
UNEVEN = Workload(batch=2, seq_len=5, dtype=torch.float32)

# (kind, the ranks of the group, bytes handed to it, their dtype)
Sent = tuple[str, tuple[int, ...], int, str]

KINDS = {
    "all_reduce": "all-reduce", "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter", "all_to_all_single": "all-to-all",
    "all_gather_single": "all-gather", "reduce_scatter_single": "reduce-scatter",
}  # fmt: skip


def groups(parallel: Parallel, rank: int) -> dict[str, tuple[int, ...]]:
    """axis -> the ranks that `rank` talks to over it."""
    found: dict[str, tuple[int, ...]] = {}
    for sizes in (parallel.dense_mesh(), parallel.sparse_mesh()):
        places = Mesh(sizes).coordinates()
        for axis in sizes:
            others = {a: p for a, p in places[rank].items() if a != axis}
            found[axis] = tuple(
                r for r, place in enumerate(places) if others.items() <= place.items()
            )
    return found


def as_sent(entries: Iterable[Entry], parallel: Parallel, rank: int) -> Counter[Sent]:
    by_axis = groups(parallel, rank)
    return Counter((e.kind, by_axis[e.axis], e.nbytes, e.dtype) for e in entries)


def traced(found: Trace, rank: int = 0) -> Counter[Sent]:
    return as_sent([*found.collectives, *found.gradient_sums], found.parallel, rank)


class CollectivesCounted(TorchDispatchMode):
    """Every tensor that is handed to torch.distributed, whatever the backend."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[Sent] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        space, _, name = func._schema.name.partition("::")
        if space == "_c10d_functional" and name in KINDS:
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            ranks = tuple(dist.get_process_group_ranks(group))
            self.sent[KINDS[name], ranks, args[0].nbytes, dtype_name(args[0])] += 1
        return func(*args, **(kwargs or {}))


def step(
    parallel: Parallel, work: Workload, config: MoEConfig = CONFIG
) -> tuple[Counter[Sent], Counter[Sent]]:
    """What the ledger of this rank says of a step, and what went to torch.distributed."""
    dense = device_mesh(parallel.dense_mesh())
    sparse = device_mesh(parallel.sparse_mesh())
    with set_current_mesh(dense), ledger() as record:
        moe = MoE(config, parallel, sparse_mesh=sparse).to(work.dtype)
        x = torch.ones(work.global_shape(config, parallel), dtype=work.dtype)
        x = split(x, moe.layout.input, dense)[dist.get_rank()].requires_grad_()
        watched.add(dist.get_rank())
        with CollectivesCounted() as counted:
            with typecheck():
                y = moe(assert_type(x, moe.input_types(work.seq_len)), seq_len=work.seq_len)
            y.backward(torch.ones_like(y))
            reduce_gradients(moe, meshes=(dense, sparse))
        watched.discard(dist.get_rank())
    return as_sent(record.entries, parallel, dist.get_rank()), counted.sent


def steps(parallels: list[Parallel], work: Workload) -> list[Any]:
    return [step(parallel, work) for parallel in parallels]


watched: set[int] = set()  # simulated ranks that are inside a step


@pytest.fixture
def seen_by_backend(monkeypatch: pytest.MonkeyPatch) -> dict[int, Counter[Sent]]:
    """rank -> what reached the simulator's backend."""
    seen: dict[int, Counter[Sent]] = {}
    post = SimGroup.post

    def counting(group: SimGroup, call: SimCall) -> Any:
        if group.global_rank in watched:
            size = sum(tensor.nbytes for tensor in call.inputs)
            of_rank = seen.setdefault(group.global_rank, Counter())
            (dtype,) = {dtype_name(tensor) for tensor in call.inputs}
            of_rank[KINDS[call.name], tuple(group.ranks), size, dtype] += 1
        return post(group, call)

    monkeypatch.setattr(SimGroup, "post", counting)
    return seen


MANY = [p for p in PARALLELS if p.num_ranks > 1]


def name_of(parallel: Parallel) -> str:
    return f"{configuration(parallel)}-{parallel.num_ranks}"


@pytest.mark.parametrize("parallel", MANY, ids=name_of)
def test_on_simulated_ranks(
    parallel: Parallel, seen_by_backend: dict[int, Counter[Sent]]
) -> None:
    """Trace, ledger, torch.distributed and the backend all say the same, on every rank."""
    found = trace(CONFIG, parallel, EVEN)
    ranks = run_ranks(parallel.dense_mesh(), step, parallel, EVEN)
    for rank, (said, counted) in enumerate(ranks):
        assert traced(found, rank) == said == counted == seen_by_backend[rank]


@pytest.mark.parametrize("parallel", [p for p in MANY if p.ep > 1][:3], ids=name_of)
def test_fast_paths_of_round_robin_send_what_is_traced(
    parallel: Parallel, seen_by_backend: dict[int, Counter[Sent]]
) -> None:
    """No counts are exchanged, and the splits are padded to be equal: 6 experts, 16 slots."""
    config = replace(CONFIG, num_experts=3 * parallel.ep, top_k=1)
    fast = replace(parallel, equal_tokens=True, max_padding=math.inf)
    found = trace(config, fast, EVEN)
    over_ep = [e for e in found.collectives if e.axis == "ep"]
    assert [e.kind for e in over_ep] == ["all-to-all"] * 4
    assert len({e.nbytes for e in over_ep}) == 1
    ranks = run_ranks(fast.dense_mesh(), step, fast, EVEN, config)
    for rank, (said, counted) in enumerate(ranks):
        assert traced(found, rank) == said == counted == seen_by_backend[rank]


@pytest.mark.parametrize("parallel", [p for p in MANY if p.ep == 1], ids=name_of)
def test_pieces_of_unequal_length_are_counted_as_they_travel(
    parallel: Parallel, seen_by_backend: dict[int, Counter[Sent]]
) -> None:
    found = trace(CONFIG, parallel, UNEVEN)
    said, counted = run_ranks(parallel.dense_mesh(), step, parallel, UNEVEN)[0]
    assert traced(found) == said == counted == seen_by_backend[0]


@pytest.mark.parametrize("size", [2, 4])
def test_on_gloo(size: int) -> None:
    parallels = [p for p in PARALLELS if p.num_ranks == size]
    ranks = run_ranks(size, steps, parallels, EVEN, backend="gloo")
    for rank, results in enumerate(ranks):
        for parallel, (said, counted) in zip(parallels, results, strict=True):
            assert traced(trace(CONFIG, parallel, EVEN), rank) == said == counted


def test_backward_collectives_are_told_from_forward_ones() -> None:
    parallel = Parallel(dp=2, tp=2, ep=2, sequence_parallel=True)
    entries = trace(CONFIG, parallel, EVEN).collectives
    kinds = Counter((e.axis, e.kind, e.backward) for e in entries)
    assert kinds == {
        ("ep", "all-to-all", False): 3, ("ep", "all-to-all", True): 2,
        ("tp", "all-gather", False): 1, ("tp", "all-gather", True): 1,
        ("tp", "reduce-scatter", False): 1, ("tp", "reduce-scatter", True): 1,
    }  # fmt: skip


def test_the_dtype_is_said_where_it_is_not_that_of_the_tensor() -> None:
    mesh = Mesh({"tp": 2})
    wide = Entry("tp", "all-reduce", 8, "float32", "here", backward=True)
    own = Entry("tp", "all-gather", 4, "bfloat16", "here")
    row = Crossing(
        "x", "f", COLLECTIVE, False, "bfloat16", (2,), TensorType(mesh, (R,)), True,
        [own], [wide],
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    show_crossings(console, "title", [row])
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "all-gather tp 4 B" in shown and "bf16" not in shown
    assert "<- all-reduce tp 8 B f32" in shown
    assert [entry["dtype"] for entry in of_entries([own, wide])] == ["bfloat16", "float32"]
