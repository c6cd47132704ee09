"""Strategy: where the tokens of a Mixture-of-Experts layer go, and with which weights.

The hard cases are likely: no tokens, experts without tokens, nearly all tokens to the same
experts, all of them to one, every token to every expert. No layer is known here; a routing
is two tensors and the numbers that bound them.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor

# Gates are multiples of 1/8: sums and products with small whole numbers are exact.
_PARTS = 8


@dataclass(frozen=True, eq=False)
class DrawnRouting:
    """Each token's `top_k` experts, all different, and its gates, which sum to one."""

    num_experts: int
    expert_ids_TK: Tensor
    gates_TK: Tensor

    @property
    def num_tokens(self) -> int:
        return self.expert_ids_TK.shape[0]

    @property
    def top_k(self) -> int:
        return self.expert_ids_TK.shape[1]

    @property
    def counts_E(self) -> Tensor:  # noqa: N802 (named like a tensor)
        """How many tokens each expert gets."""
        return torch.bincount(self.expert_ids_TK.flatten(), minlength=self.num_experts)

    def __repr__(self) -> str:
        ids, gates = (cast(Any, t).tolist() for t in (self.expert_ids_TK, self.gates_TK))
        return (
            f"DrawnRouting(num_tokens={self.num_tokens}, num_experts={self.num_experts}, "
            f"top_k={self.top_k}, expert_ids_TK={ids}, gates_TK={gates})"
        )


def routings(
    *,
    min_tokens: int = 0,
    max_tokens: int = 8,
    min_experts: int = 1,
    max_experts: int = 6,
    min_top_k: int = 1,
    max_top_k: int | None = None,
    multiple_of: int = 1,
) -> st.SearchStrategy[DrawnRouting]:
    """Draw routings of tokens to experts; `top_k` goes up to the number of experts.

    The number of experts is a multiple of `multiple_of`: that of the ranks that share
    them. Shrinks toward few tokens, few experts, one choice, and all tokens alike.
    """
    most = max_experts if max_top_k is None else max_top_k
    for name, least, low, high in (
        ("tokens", 0, min_tokens, max_tokens),
        ("experts", 1, min_experts, max_experts),
        ("top_k", 1, min_top_k, most),
        ("multiple_of", 1, multiple_of, multiple_of),
    ):
        if not least <= low <= high:
            raise ValueError(
                f"routings({name}): need {least} <= min <= max, got {low} and {high}"
            )
    first = -(-max(min_experts, min_top_k) // multiple_of)
    last = max_experts // multiple_of
    if first > last:
        raise ValueError(
            f"routings: no multiple of {multiple_of} lies between "
            f"{max(min_experts, min_top_k)} (min_experts, min_top_k) and {max_experts} "
            "(max_experts)"
        )
    experts = st.integers(first, last).map(lambda held: held * multiple_of)
    return _routings(st.integers(min_tokens, max_tokens), experts, min_top_k, most)


@st.composite
def _routings(
    draw: st.DrawFn,
    tokens: st.SearchStrategy[int],
    experts: st.SearchStrategy[int],
    min_top_k: int,
    max_top_k: int,
) -> DrawnRouting:
    num_tokens, num_experts = draw(tokens), draw(experts)
    top_k = draw(_ends_first(min_top_k, min(max_top_k, num_experts)))
    # The experts that any token may go to, the others are empty; the first `top_k` of
    # them are what tokens prefer, so that counts are skewed.
    num_busy = draw(_ends_first(top_k, num_experts))
    busy = draw(st.permutations(range(num_experts)))[:num_busy]
    choices = st.one_of(
        st.just(busy[:top_k]), st.permutations(busy).map(lambda ids: ids[:top_k])
    )
    ids = [draw(choices) for _ in range(num_tokens)]
    gates = [draw(_gates(top_k)) for _ in range(num_tokens)]
    return DrawnRouting(
        num_experts,
        torch.tensor(ids, dtype=torch.int64).view(num_tokens, top_k),
        torch.tensor(gates, dtype=torch.float64).view(num_tokens, top_k),
    )


def _ends_first(low: int, high: int) -> st.SearchStrategy[int]:
    """Draw whole numbers; the ends, the hard cases, as often as all others."""
    return st.one_of(st.just(low), st.just(high), st.integers(low, high))


def _gates(top_k: int) -> st.SearchStrategy[list[float]]:
    """Draw numbers >= 0 that sum to one: the pieces of a cut line."""
    cut = st.lists(st.integers(0, _PARTS), min_size=top_k - 1, max_size=top_k - 1)
    return cut.map(sorted).map(
        lambda ends: [
            (b - a) / _PARTS for a, b in zip([0, *ends], [*ends, _PARTS], strict=True)
        ]
    )
