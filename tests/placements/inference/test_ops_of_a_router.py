"""The ops of a router on dp=2, tp=4 keep the placement of the tokens."""

import torch

import placements
from placements import Folded, Index, P, S, type_of
from tests.support.checked import checked_on
from tests.support.router_tokens import TOKENS, B, D, E, K, L, scores, tokens

checked = checked_on(dp=2, tp=4)


def test_router_ops_keep_the_placement_of_the_tokens() -> None:
    s = scores()
    top, ids = s.topk(K, dim=-1)
    gates = s.gather(-1, ids)
    chosen = torch.zeros_like(s).scatter_(-1, ids, 1.0)
    for x in (s, top, ids, gates, chosen):
        assert type_of(x) == TOKENS
    assert type_of(chosen.sum(dim=(0, 1))) == {"dp": P, "tp": P}


def test_a_mask_made_by_zeros_takes_the_placement_of_what_is_scattered() -> None:
    _, ids = scores().topk(K, dim=-1)
    mask = torch.zeros(*ids.shape[:2], E, dtype=torch.bool).scatter_(-1, ids, True)
    assert type_of(mask) == TOKENS
    assert type_of(mask.sum(dim=(0, 1))) == {"dp": P, "tp": P}


def test_flattening_the_tokens_folds_the_sequence() -> None:
    flat = tokens().reshape(-1, D)
    found = type_of(flat)
    assert found == {"dp": S(0), "tp": S(0)}
    assert found is not None and isinstance(found["tp"], S)
    assert found["tp"].extent == Folded(B, placements.Even(4 * L))
    assert type_of(flat.view(B, L, D)) == TOKENS


def test_ids_know_that_they_count_experts() -> None:
    _, ids = scores().topk(K, dim=-1)
    known = type_of(ids)
    assert known is not None and known.index == Index(E)
