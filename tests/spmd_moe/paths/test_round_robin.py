"""Turns by hand (seeds.md 5.4), and the orders that are kept of them."""

import pytest
import torch

from placements import set_current_mesh, typecheck
from spmd_moe.paths import round_robin
from spmd_moe.paths.round_robin import KEPT, Turns, cached_orders

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tokens", "choices", "experts", "counts"),
    [
        (5, 3, 4, [4, 4, 4, 3]),
        (5, 2, 4, [3, 3, 2, 2]),
        (3, 2, 8, [1, 1, 1, 1, 1, 1, 0, 0]),
        (7, 2, 6, [3, 3, 2, 2, 2, 2]),
        (1, 1, 4, [1, 0, 0, 0]),
        (0, 2, 4, [0, 0, 0, 0]),
    ],
)
def test_counts_are_those_of_the_ids(
    tokens: int, choices: int, experts: int, counts: list[int]
) -> None:
    turns = Turns(tokens, choices, experts)
    ids_TK = turns.expert_ids(CPU)
    assert turns.counts() == counts
    assert torch.bincount(ids_TK.flatten(), minlength=experts).tolist() == counts


def test_the_order_by_hand() -> None:
    turns = Turns(5, 3, 4)
    assert turns.expert_ids(CPU).tolist() == [
        [0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3], [0, 1, 2]
    ]  # fmt: skip
    order_N, inverse_N = turns.order(CPU)
    assert order_N.tolist() == [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11]
    assert (order_N // 3).tolist() == [0, 1, 2, 4, 0, 1, 3, 4, 0, 2, 3, 4, 1, 2, 3]
    assert order_N[inverse_N].tolist() == list(range(15))
    assert torch.equal(order_N, turns.expert_ids(CPU).flatten().argsort(stable=True))


def test_an_order_is_sorted_once_and_few_are_kept() -> None:
    round_robin._order.cache_clear()
    for tokens in (3, 3, 4, 3):
        Turns(tokens, 2, 4).order(CPU)
    assert round_robin._order.cache_info().hits == 2 and cached_orders() == 2
    for tokens in range(3 * KEPT):
        Turns(tokens, 2, 4).order(CPU)
    assert cached_orders() == KEPT


def test_devices_and_sizes_have_orders_of_their_own() -> None:
    assert Turns(4, 2, 4).order(torch.device("meta"))[0].is_meta
    assert not Turns(4, 2, 4).order(CPU)[0].is_meta
    assert Turns(2, 4, 4).order(CPU)[0].tolist() == Turns(4, 2, 4).order(CPU)[0].tolist()


def test_an_order_made_in_inference_mode_serves_a_training_step() -> None:
    round_robin._order.cache_clear()
    with torch.inference_mode():
        Turns(4, 2, 4).order(CPU)
    order_N, _ = Turns(4, 2, 4).order(CPU)
    x = torch.randn(8, 2, requires_grad=True)
    x.index_select(0, order_N).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(8, 2))


def test_types_of_one_use_are_not_those_of_another() -> None:
    """A kept order has no type, whatever its last user declared of it."""
    from placements import V, assert_type, type_of

    for mesh in ({"tp": 2}, {"ep": 2}):
        with set_current_mesh(mesh), typecheck():
            order_N, inverse_N = Turns(4, 2, 4).order(CPU)
            assert type_of(order_N) is None and type_of(inverse_N) is None
            assert_type(order_N, dict.fromkeys(mesh, V))
