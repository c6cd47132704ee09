"""How many rows go where: by hand (seeds.md 5.4), and what ranks must not assume."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placements import (
    Ragged,
    S,
    V,
    assert_type,
    ledger,
    set_current_mesh,
    split,
    type_of,
    typecheck,
    verify,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.mesh import as_mesh
from spmd_moe import MoE, Parallel
from spmd_moe.paths.agreement import (
    AbstractAgreement,
    Agreed,
    ByExchange,
    ByGather,
    ByTurns,
    equal_size,
)
from spmd_moe.paths.recorder import recording
from spmd_moe.paths.round_robin import Turns
from tests.support.moe import CONFIG, Case, build, meshes

EP2 = Parallel(tp=2, ep=2, sequence_parallel=True, equal_tokens=True)
TURNS = replace(CONFIG, round_robin=True)


def agreed(by: AbstractAgreement, rows: list[list[int]], turns: Turns | None) -> Agreed:
    """What this rank agrees on; `rows` are the slots by expert, for each rank."""
    ranks = dist.get_world_size()
    with torch._C.DisableTorchFunction():
        mesh = as_mesh(device_mesh({"edp": 1, "ep": ranks, "etp": 1}))
    with set_current_mesh(mesh), typecheck():
        counts = torch.tensor(rows[dist.get_rank()]).view(ranks, -1)
        assert_type(counts, {"ep": V})
        found = by.start(counts, int(sum(rows[dist.get_rank()])), turns, mesh)()
        assert type_of(found.received_WG) == {"ep": V}
        return found


def told(turns: Turns, ranks: int, **how: Any) -> list[Agreed]:
    """By turns on all ranks, which is what an exchange finds too."""
    rows = [turns.counts()] * ranks
    found = run_ranks({"ep": ranks}, agreed, ByTurns(ByExchange(), **how), rows, turns)
    others = run_ranks({"ep": ranks}, agreed, ByExchange(), rows, None)
    for one, other in zip(found, others, strict=True):
        assert one.received_WG.tolist() == other.received_WG.tolist() == one.by_sender
        assert one.by_sender == other.by_sender and one.counts_list == other.counts_list
        sizes = (one.exchange.sent, one.exchange.received)
        assert sizes == (other.exchange.sent, other.exchange.received)
    return found


@pytest.mark.parametrize(
    ("turns", "ranks", "sent", "received", "uniform"),
    [
        (Turns(5, 3, 4), 2, [8, 7], [[8, 8], [7, 7]], [4, None]),
        (Turns(5, 2, 4), 2, [6, 4], [[6, 6], [4, 4]], [3, 2]),
        (Turns(0, 2, 4), 2, [0, 0], [[0, 0], [0, 0]], [0, 0]),
    ],
)
def test_splits_of_turns_by_hand(
    turns: Turns, ranks: int, sent: list[int], received: list[list[int]], uniform: Any
) -> None:
    for rank, found in enumerate(told(turns, ranks)):
        assert found.exchange.sent == sent and found.exchange.size is None
        assert found.exchange.received == received[rank]
        assert found.by_sender is not None
        lengths = {length for row in found.by_sender for length in row}
        assert (lengths.pop() if len(lengths) == 1 else None) == uniform[rank]
    padded = told(turns, ranks, max_padding=math.inf)
    assert [one.exchange.size for one in padded] == [max(sent) or None] * ranks


def test_splits_of_a_large_model_by_hand() -> None:
    """12 ranks of 3 experts: 49152 = 36 * 1365 + 12."""
    turns = Turns(16384, 3, 36)
    sent = [sum(turns.counts_of_rank(rank, 12)) for rank in range(12)]
    assert sent == [4098] * 4 + [4095] * 8
    assert turns.counts_of_rank(4, 12) == [1365] * 3
    assert equal_size([sent] * 12, math.inf) == 4098
    assert equal_size([sent] * 12, 0.1) == 4098 and equal_size([sent] * 12, 0) is None


def test_the_cost_of_equal_splits_by_hand() -> None:
    splits = [[4, 2], [2, 4]]  # 2 rows of padding go and 2 come: 4 of 12
    assert equal_size(splits, 4 / 12) == 4
    assert equal_size(splits, 0.33) is None and equal_size(splits, 0.10) is None
    assert equal_size(splits, math.inf) == 4
    assert equal_size([[2, 2], [2, 2]], 0) == 2
    assert equal_size([[0, 0], [0, 0]], math.inf) is None  # nothing is sent
    # A rank without rows has nothing to compare padding with.
    assert equal_size([[2, 0], [0, 0]], 10.0) is None
    assert equal_size([[2, 0], [0, 0]], math.inf) == 2


@pytest.mark.parametrize(("limit", "size"), [(0.1, None), (0.34, 4), (math.inf, 4)])
def test_all_ranks_find_the_same_from_one_gather(limit: float, size: int | None) -> None:
    rows = [[2, 2, 1, 1], [1, 1, 2, 2]]
    first, second = run_ranks({"ep": 2}, agreed, ByGather(limit), rows, None)
    assert first.exchange.size == second.exchange.size == size
    assert first.exchange.sent == [4, 2] and first.exchange.received == [4, 2]
    assert second.exchange.sent == [2, 4] and second.exchange.received == [2, 4]
    assert first.by_sender == [[2, 2], [1, 1]] and second.by_sender == [[1, 1], [2, 2]]


def test_without_turns_the_other_way_is_taken() -> None:
    rows = [[3, 0, 1, 0], [1, 1, 1, 1]]
    by = ByTurns(ByGather(math.inf), math.inf)
    with recording() as recorder:
        found = run_ranks({"ep": 2}, agreed, by, rows, None)
    assert recorder.counts() == {} and found[0].received_WG.tolist() == [[3, 0], [1, 1]]


def kinds(case: Case) -> list[tuple[str, str]]:
    """One forward on this rank, with routing changed after the router."""
    with meshes(case.parallel) as (dense, sparse), ledger() as record:
        moe = build(case, sparse)
        router = moe.router.forward

        def without_own(x_TD: torch.Tensor) -> Any:
            return replace(router(x_TD), own=None)

        moe.router.forward = without_own  # type: ignore[method-assign]
        x = split(case.tensors()[0], moe.layout.input, dense)[dist.get_rank()]
        moe(x, seq_len=case.seq_len)
    return [(e.axis, e.kind) for e in record.entries if e.axis == "ep"]


def test_a_router_that_does_not_say_its_turns_is_not_believed_to_have_any() -> None:
    case = Case(EP2, TURNS, batch=1, seq_len=4)
    assert run_ranks({"tp": 2}, kinds, case)[0] == [("ep", "all-to-all")] * 3


def test_a_length_that_is_cut_unequally_is_refused() -> None:
    with set_current_mesh({"tp": 2}):
        moe = MoE(TURNS, EP2)
        with pytest.raises(ValueError, match=r"equal_tokens promises .* seq_len \(5\)"):
            moe(torch.randn(1, 3, 8), seq_len=5)


def unequal_batch(batches: list[int]) -> None:
    """Padded to 2 rows for each rank, exchanges of 3 and of 4 tokens look alike."""
    parallel = Parallel(dp=2, ep=2, equal_tokens=True, max_padding=math.inf)
    config = replace(TURNS, top_k=1)
    with meshes(parallel) as (_, sparse), verify():
        moe = build(Case(parallel, config), sparse)
        x = torch.randn(batches[dist.get_rank()], 1, 8, dtype=torch.float64)
        moe(assert_type(x, {"dp": S(0, Ragged(*batches))}), seq_len=1)


def test_verify_finds_a_batch_that_breaks_the_promise() -> None:
    run_ranks({"dp": 2}, unequal_batch, [4, 4])
    with pytest.raises(RankFailure, match=r"tokens is different on .* axis 'ep'"):
        run_ranks({"dp": 2}, unequal_batch, [4, 3])


def test_batches_that_cannot_be_exchanged_are_refused_by_the_simulator() -> None:
    with pytest.raises(RankFailure, match="rank 1 sends"):
        run_ranks({"dp": 2}, unequal_batch, [8, 1])


@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_padding_is_at_least_none(value: float) -> None:
    with pytest.raises(ValueError, match="max_padding"):
        Parallel(tp=2, ep=2, max_padding=value)
