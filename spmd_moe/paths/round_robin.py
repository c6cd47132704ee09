"""Round robin: slot j of a rank goes to expert j % E, whatever the scores.

`Turns` are the slots of one rank, so the host knows everything about them without a look
at any tensor: ids, counts, the order by expert. Every rank numbers its own slots from 0,
after any split of the tokens; turns of equally many tokens are equal on all ranks.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from placements import unchecked
from spmd_moe.paths.recorder import ran

# Orders that are kept, of the last numbers of tokens that were seen.
KEPT = 16


@dataclass(frozen=True)
class Turns:
    """Slots in turn: `choices` of each of `tokens` tokens, dealt to `experts`."""

    tokens: int
    choices: int
    experts: int

    @property
    def slots(self) -> int:
        return self.tokens * self.choices

    def expert_ids(self, device: torch.device) -> Tensor:
        slots = torch.arange(self.slots, device=device)
        return (slots % self.experts).view(self.tokens, self.choices)

    def counts(self) -> list[int]:
        """Return the slots of each expert; what is left over goes to the first ones."""
        turns, rest = divmod(self.slots, self.experts)
        return [turns + (expert < rest) for expert in range(self.experts)]

    def counts_of_rank(self, rank: int, ranks: int) -> list[int]:
        """Return the counts of the experts that are on one of so many ranks."""
        here = self.experts // ranks
        return self.counts()[rank * here : (rank + 1) * here]

    def order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the slots by expert and the inverse of that order, sorted once.

        They carry no type, and are nobody's own: they must not be written.
        """
        ran("cached_order")
        sizes = self.slots, self.experts, self.choices
        order_N, inverse_N = _order(device.type, device.index, *sizes)
        with unchecked():  # another name, so that types of one use are not those of another
            return order_N.view_as(order_N), inverse_N.view_as(inverse_N)


@lru_cache(maxsize=KEPT)
def _order(
    device: str, index: int | None, slots: int, experts: int, choices: int
) -> tuple[Tensor, Tensor]:
    """Sort the slots, as all later calls with these arguments will have them.

    The key has `choices`, though the order does not depend on it, since tokens do.
    """
    place = torch.device(device if index is None else f"{device}:{index}")
    # What inference mode makes, autograd may not keep for a later training step.
    with unchecked(), torch.inference_mode(False), torch.no_grad():
        order_N = (torch.arange(slots, device=place) % experts).argsort(stable=True)
        inverse_N = torch.empty_like(order_N)
        inverse_N[order_N] = torch.arange(slots, device=place)
    return order_N, inverse_N


def cached_orders() -> int:
    """Return how many orders are kept."""
    return _order.cache_info().currsize
