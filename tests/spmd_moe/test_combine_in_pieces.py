"""Combining a few tokens at a time is combining all of them, bit for bit."""

from typing import Any

import pytest
import torch

from placements import set_current_mesh, typecheck
from spmd_moe import MoE, MoEConfig
from spmd_moe import combine as combine_all
from spmd_moe import layer as layer_module
from spmd_moe.combine import PIECE, combine_in_pieces
from spmd_moe.layouts import layout

C4 = layout("C4")
CHOICES, DIM = 4, 1024
TOKENS_OF_A_PIECE = PIECE // (CHOICES * DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("more", [-TOKENS_OF_A_PIECE, -1, 0, 1, TOKENS_OF_A_PIECE + 1])
def test_pieces_give_the_bits_of_the_whole(
    dtype: torch.dtype, narrow: bool, weigh: bool, more: int
) -> None:
    torch.manual_seed(0)
    tokens = TOKENS_OF_A_PIECE + more
    rows_ND = torch.randn(tokens * CHOICES, DIM).to(dtype)
    gates_TK, inverse_N = torch.rand(tokens, CHOICES), torch.randperm(tokens * CHOICES)
    how: Any = {"weigh": weigh, "narrow": narrow}
    whole = combine_all(rows_ND.index_select(0, inverse_N), gates_TK, C4, **how)
    assert torch.equal(combine_in_pieces(rows_ND, inverse_N, gates_TK, C4, **how), whole)


def test_a_token_wider_than_a_piece_is_one() -> None:
    rows_ND, gates_TK = torch.randn(3, PIECE + 1), torch.rand(3, 1)
    order_N = torch.tensor([2, 0, 1])
    found = combine_in_pieces(rows_ND, order_N, gates_TK, C4, weigh=True, narrow=False)
    assert torch.equal(found, rows_ND[order_N] * gates_TK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_uses_them_where_nobody_can_tell(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without gradients and checks; the bits are those with checks, and with gradients."""
    used: list[int] = []

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        used.append(1)
        return combine_in_pieces(*args, **options)

    monkeypatch.setattr(layer_module, "combine_in_pieces", counted)
    moe = MoE(MoEConfig(dim=DIM, hidden_dim=8, num_experts=8, top_k=CHOICES), dtype=dtype)
    tokens = 2 * TOKENS_OF_A_PIECE + 1
    x_TD = torch.randn(tokens, DIM).to(dtype)
    y_TD = moe(x_TD, seq_len=tokens)
    assert not used
    with torch.no_grad():
        assert torch.equal(moe(x_TD, seq_len=tokens), y_TD)
        assert used == [1]
        with set_current_mesh({}), typecheck():
            assert torch.equal(moe(x_TD, seq_len=tokens), y_TD)
