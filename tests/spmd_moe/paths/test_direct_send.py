"""Rows to send made without an index: by hand, and refused wherever they would be wrong."""

import pytest
import torch

from spmd_moe.paths.direct_send import direct_rows, goes_direct
from spmd_moe.paths.equal_split import Exchange, pad
from spmd_moe.paths.round_robin import Turns

CPU = torch.device("cpu")


def exchange_of(turns: Turns, ranks: int, padded: bool = True) -> Exchange:
    sent = [sum(turns.counts_of_rank(rank, ranks)) for rank in range(ranks)]
    return Exchange(sent, sent, max(sent) if padded else None)


def by_index(x_TD: torch.Tensor, turns: Turns, exchange: Exchange) -> torch.Tensor:
    order_N, _ = turns.order(CPU)
    rows_ND = x_TD[order_N // turns.choices]
    return rows_ND if exchange.size is None else pad(rows_ND, exchange.sent, exchange.size)


@pytest.mark.parametrize(
    ("turns", "ranks", "tokens"),
    [  # Z, a row of padding, is written -1
        (Turns(5, 2, 4), 2, [0, 2, 4, 0, 2, 4, 1, 3, 1, 3, -1, -1]),
        (Turns(7, 2, 6), 3, [0, 3, 6, 0, 3, 6, 1, 4, 1, 4, -1, -1, 2, 5, 2, 5, -1, -1]),
        (Turns(4, 2, 4), 2, [0, 2, 0, 2, 1, 3, 1, 3]),
    ],
)
def test_by_hand(turns: Turns, ranks: int, tokens: list[int]) -> None:
    x_TD = torch.arange(1.0, turns.tokens + 1).unsqueeze(1)
    assert goes_direct(turns, ranks, weigh=False)
    rows = direct_rows(x_TD, turns.choices, exchange_of(turns, ranks))
    assert (rows.flatten() - 1).tolist() == tokens


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tokens", range(9))
@pytest.mark.parametrize(("choices", "ranks"), [(1, 2), (2, 2), (2, 3), (3, 4)])
def test_values_and_gradients_are_those_of_sorting(
    tokens: int, choices: int, ranks: int, padded: bool
) -> None:
    turns = Turns(tokens, choices, choices * ranks)
    exchange = exchange_of(turns, ranks, padded)
    generator = torch.Generator().manual_seed(tokens)
    numbers = torch.randint(-9, 9, (tokens, 3), generator=generator).double()
    x, other = (numbers.clone().requires_grad_() for _ in range(2))
    rows, wanted = direct_rows(x, choices, exchange), by_index(other, turns, exchange)
    assert torch.equal(rows, wanted)
    weights = torch.randint(-9, 9, rows.shape, generator=generator).double()
    (rows * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert x.grad is not None and other.grad is not None
    assert torch.equal(x.grad, other.grad)


def test_it_is_not_taken_where_a_rank_has_another_number_of_experts() -> None:
    """The fork checked only whether splits divide: here it made 24 rows of 12."""
    turns = Turns(6, 2, 8)
    assert not goes_direct(turns, 2, weigh=False)
    exchange = exchange_of(turns, 2)
    assert (exchange.sent, exchange.size) == ([8, 4], 8)
    order_N, _ = turns.order(CPU)
    assert (order_N // 2).tolist() == [0, 4, 0, 4, 1, 5, 1, 5, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="rank 0 is to get 8 rows, but 4 times its 3"):
        direct_rows(torch.ones(6, 1), 4, exchange)
    with pytest.raises(ValueError, match="as many choices as experts on each rank"):
        direct_rows(torch.ones(6, 1), 2, exchange)


def test_it_is_not_taken_with_gates_before_the_experts() -> None:
    assert not goes_direct(Turns(4, 2, 4), 2, weigh=True)


def test_splits_that_are_not_those_of_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="is to get 5 rows"):
        direct_rows(torch.ones(5, 1), 2, Exchange([5, 5], [5, 5], 5))
