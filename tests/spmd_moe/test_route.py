"""The router, and seed #3753: scatters on token-sharded tensors keep their placement."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    Index,
    Mesh,
    P,
    Padded,
    PlacementError,
    R,
    S,
    all_reduce,
    assert_type,
    join,
    ledger,
    set_current_mesh,
    split,
    type_of,
    typecheck,
)
from placements.testing import device_mesh, run_ranks
from spmd_moe import MoEConfig, Parallel, Router
from spmd_moe.layouts import configuration, layout
from spmd_moe.meshes import ONE_DEVICE
from spmd_moe.permute import count_experts, routing_map
from spmd_moe.route import keep_best_groups, round_robin
from tests.support.moe import CONFIG, Case, assert_equals_one_device, on_ranks

IDS = torch.tensor([[0, 1], [1, 2], [3, 0], [1, 3]])


def make(config: MoEConfig = CONFIG, parallel: Parallel = Parallel()) -> Router:  # noqa: B008
    return Router(config, layout(configuration(parallel)), ONE_DEVICE).double()


def counted(ids_TK: Tensor) -> tuple[list[int], list[int]]:
    with set_current_mesh(device_mesh()) as mesh, typecheck():
        assert mesh is not None
        mine = split(ids_TK, {"tp": S(0)}, mesh)[mesh.coordinate["tp"]]
        assert_type(mine, {"tp": S(0, Padded(len(ids_TK)))}, index=Index(4))
        counts_E = count_experts(mine, 4)
        assert type_of(counts_E) == {"tp": P}
        total_E = all_reduce(counts_E, "tp", src=P, dst=R)
    return counts_E.tolist(), total_E.tolist()


@pytest.mark.parametrize(
    ("tokens", "local", "total"),
    [
        (4, [[1, 2, 1, 0], [1, 1, 0, 2]], [2, 3, 1, 2]),
        (3, [[1, 2, 1, 0], [1, 0, 0, 1]], [2, 2, 1, 1]),
        (1, [[1, 1, 0, 0], [0, 0, 0, 0]], [1, 1, 0, 0]),
        (0, [[0, 0, 0, 0], [0, 0, 0, 0]], [0, 0, 0, 0]),
    ],
)
def test_counts_are_partial_and_exact(
    tokens: int, local: list[list[int]], total: list[int]
) -> None:
    results = run_ranks({"tp": 2}, counted, IDS[:tokens])
    assert [own for own, _ in results] == local
    assert [summed for _, summed in results] == [total] * 2


def test_node_limited_hand_case() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5]])
    kept = keep_best_groups(scores, 2, 1)
    assert kept.tolist() == [[float("-inf"), float("-inf"), *scores[0, 2:].tolist()]]


def router_ops(scores: Tensor) -> dict[str, Tensor]:
    """Every op of the router that writes or chooses along the expert dim."""
    kept = keep_best_groups(scores, 4, 2)
    ids = kept.topk(3, dim=1).indices
    return {
        "limited": kept,
        "ids": ids,
        "map": routing_map(ids, 8),
        "gates": scores.gather(1, ids),
    }


def pieces_of_router_ops(scores: Tensor) -> dict[str, Tensor]:
    with set_current_mesh(device_mesh()) as mesh, ledger() as record:
        assert mesh is not None
        here = split(scores, {"tp": S(0)}, mesh)[mesh.coordinate["tp"]]
        placed = {"tp": S(0, Padded(len(scores)))}
        with typecheck():
            found = router_ops(assert_type(here, placed))
            for name, value in found.items():
                assert type_of(value) == placed, name
            assert type_of(round_robin(here, 3)) == placed
        assert not record.entries
    return found


@pytest.mark.parametrize("tokens", range(6))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_scatters_along_experts_keep_their_placement(tokens: int, ranks: int) -> None:
    scores = torch.rand(tokens, 8, generator=torch.Generator().manual_seed(1))
    pieces = run_ranks({"tp": ranks}, pieces_of_router_ops, scores)
    for name, whole in router_ops(scores).items():
        joined = join([piece[name] for piece in pieces], {"tp": S(0)}, {"tp": ranks})
        assert torch.equal(joined, whole), name


def test_a_scatter_along_tokens_is_refused() -> None:
    """The wrong version: a map written along the dim that is cut."""
    ids_TK = IDS[:2].clone()
    with set_current_mesh({"tp": 2}), typecheck():
        assert_type(ids_TK, {"tp": S(0, Padded(3))}, index=Index(4))
        map_TE = assert_type(torch.zeros(2, 4, dtype=torch.bool), {"tp": S(0, Padded(3))})
        with pytest.raises(PlacementError) as caught:
            map_TE.scatter(0, ids_TK, True)
    assert caught.value.axis == "tp"


@pytest.mark.parametrize(
    ("parallel", "given", "expected"),
    [
        (Parallel(tp=2, ep=2, sequence_parallel=True), R, P),
        (Parallel(tp=2, sequence_parallel=True), P, R),
    ],
)
def test_counts_of_another_type_are_refused_by_name(
    parallel: Parallel, given: Any, expected: Any
) -> None:
    """Consumer contract: module, argument, actual and expected placement."""
    router = make(parallel=parallel)
    with set_current_mesh(parallel.dense_mesh()), typecheck():
        counts_E = assert_type(torch.zeros(4, dtype=torch.int64), {"tp": given})
        with pytest.raises(PlacementError) as caught:
            router.balance.record(counts_E)
    error = caught.value
    assert (error.name, error.axis) == ("counts_E", "tp")
    assert (error.expected, error.actual) == (repr(expected), repr(given))
    assert "LoadBalance.record" in error.where


def test_axes_of_size_one_are_not_compared() -> None:
    counts = layout("C1").counts_E
    for sizes in ({"dp": 1, "cp": 1, "tp": 2}, {"dp": 2, "cp": 1, "tp": 2}):
        with set_current_mesh(sizes), typecheck():
            x = assert_type(torch.zeros(4), counts)
            assert type_of(x) == {axis: P for axis, n in sizes.items() if n > 1}


def test_bias_changes_the_choice_and_not_the_gates() -> None:
    router = make(replace(CONFIG, top_k=1))
    x_TD = torch.randn(6, 8, dtype=torch.float64)
    router.balance.expert_bias_E[2] = 100.0
    routing = router(x_TD)
    assert routing.expert_ids_TK.flatten().tolist() == [2] * 6
    torch.testing.assert_close(
        routing.gates_TK[:, 0], router.score(router.logits(x_TD))[:, 2]
    )


@pytest.mark.parametrize("function", ["sigmoid", "softmax"])
def test_gates_are_normalised_and_scaled(function: str) -> None:
    config = replace(CONFIG, score_function=function, route_norm=True, route_scale=2.5)
    routing = make(config)(torch.randn(6, 8, dtype=torch.float64))
    total = torch.full((6,), 2.5, dtype=torch.float64)
    torch.testing.assert_close(routing.gates_TK.sum(1), total)


def test_scores_are_float32_for_bfloat16_tokens() -> None:
    router = make().to(torch.bfloat16)
    x_TD = torch.randn(6, 8, dtype=torch.bfloat16)
    scores_TE = router.score(router.logits(x_TD))
    assert scores_TE.dtype == torch.float32
    logits_TE = x_TD.float() @ router.w_gate_ED.float().T
    torch.testing.assert_close(scores_TE, logits_TE.sigmoid(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "counts"),
    [
        (5, 3, 4, [4, 4, 4, 3]),
        (5, 2, 4, [3, 3, 2, 2]),
        (3, 2, 8, [1, 1, 1, 1, 1, 1, 0, 0]),
        (7, 2, 6, [3, 3, 2, 2, 2, 2]),
        (1, 1, 4, [1, 0, 0, 0]),
    ],
)
def test_round_robin_is_balanced(
    tokens: int, choices: int, experts: int, counts: list[int]
) -> None:
    config = replace(CONFIG, num_experts=experts, top_k=choices, round_robin=True)
    router = make(config)
    x_TD = torch.randn(tokens, 8, dtype=torch.float64)
    routing = router(x_TD)
    assert routing.counts_E.tolist() == counts
    assert routing.expert_ids_TK.flatten().tolist() == [
        slot % experts for slot in range(tokens * choices)
    ]
    gates_TK = router.score(router.logits(x_TD)).gather(1, routing.expert_ids_TK)
    torch.testing.assert_close(routing.gates_TK, gates_TK)


def first_turns(config: MoEConfig, parallel: Parallel) -> tuple[list[int], list[int]]:
    """The round robin of this rank's own tokens, one more on rank 1 than on rank 0."""
    router = make(config, parallel)
    with set_current_mesh(device_mesh()) as mesh:
        assert mesh is not None
        tokens = 3 + mesh.coordinate["tp"]
        routing = router(torch.randn(tokens, 8, dtype=torch.float64))
    return routing.expert_ids_TK.flatten().tolist(), routing.counts_E.tolist()


def test_round_robin_starts_at_expert_0_on_every_rank() -> None:
    """seeds.md 5.1.1: the slots of a rank are numbered by itself."""
    parallel = Parallel(tp=2, ep=2, sequence_parallel=True)
    config = replace(CONFIG, round_robin=True)
    assert run_ranks(parallel.dense_mesh(), first_turns, config, parallel) == [
        ([0, 1, 2, 3, 0, 1], [2, 2, 1, 1]),
        ([0, 1, 2, 3, 0, 1, 2, 3], [2, 2, 2, 2]),
    ]


@pytest.mark.parametrize("before", [False, True])
def test_round_robin_equals_the_reference_on_one_device(before: bool) -> None:
    config = replace(CONFIG, round_robin=True, route_norm=True, top_k=3)
    case = Case(Parallel(), replace(config, score_before_experts=before), seq_len=7)
    assert_equals_one_device(case, on_ranks(case))


def test_round_robin_type_checks_on_ranks() -> None:
    parallel = Parallel(tp=2, ep=2, sequence_parallel=True)
    router = make(replace(CONFIG, round_robin=True), parallel)
    with set_current_mesh(Mesh(parallel.dense_mesh())), typecheck():
        x_TD = torch.randn(3, 8, dtype=torch.float64)
        assert_type(x_TD, {"tp": S(0, Padded(5))})
        routing = router(x_TD)
        assert type_of(routing.gates_TK) == {"tp": S(0, Padded(5))}
        assert type_of(routing.counts_E) == {"tp": P}
