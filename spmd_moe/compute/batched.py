"""Experts that all have the same number of rows, without gradients: two batched products.

    experts.compute = Batched()                      # puts w1 and w3 together in each call
    experts.compute = Batched(WeightCache(experts))  # keeps them together between calls

Both are a choice of who runs a model, because they cost memory: the copies of a cache are
as large as the weights, and they are no part of the state of the module.

A cache is only right as long as it can tell that a weight was written. It looks at the
memory, at how often torch wrote there, at shape, strides, dtype and device. It is emptied
when a state is loaded, when any optimizer has stepped, and by `train()`. What it cannot
tell is a write that torch does not count and that none of these precedes: `w.data.add_(1)`,
or numpy writing into shared memory. Call `forget()` after those. It keeps nothing of
inference tensors, whose writes nobody counts, and nothing of a weight that is not the very
parameter it was made for: FSDP2 brings parameters of its own and writes to their memory
without counting, and autocast brings copies.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.optim.optimizer import register_optimizer_step_post_hook

from placements import version_of
from spmd_moe.compute.by_expert import (
    AbstractExpertCompute,
    ByExpert,
    counts_on_host,
    is_plain_cpu,
)
from spmd_moe.compute.grouped_mm import in_autocast_dtype
from spmd_moe.compute.products import is_widened
from spmd_moe.paths.recorder import ran
from spmd_moe.precision import without_autocast

# Is told by name what ran.
Tell = Callable[[str], object]


class WeightCache:
    """Copies of one module's weights in another order, as long as they are up to date."""

    def __init__(self, experts: nn.Module) -> None:
        self._own = [weakref.ref(p) for p in experts.parameters()]
        if any(type(p) is not nn.Parameter for p in experts.parameters()):
            raise TypeError(
                "the parameters are no plain parameters, but a cache is only right for "
                "those: under FSDP2 use Batched() without a cache"
            )
        self._kept: dict[str, tuple[object, Tensor]] = {}
        forget = weakref.WeakMethod(self.forget)

        def stepped(*_: Any) -> None:
            if (alive := forget()) is not None:
                alive()

        hook: Any = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, hook.remove)

    def forget(self) -> None:
        """Drop all copies."""
        self._kept.clear()

    def get(
        self, name: str, make: Callable[[], Tensor], sources: tuple[Tensor, ...], tell: Tell
    ) -> Tensor:
        """Return what `make` makes of the sources, made anew only if they changed."""
        if not all(self._is_own(source) for source in sources):
            return make()
        key = tuple(_state_of(source) for source in sources)
        kept = self._kept.get(name)
        if kept is not None and kept[0] == key:
            tell(f"cached_{name}_hit")
            return kept[1]
        tell(f"cached_{name}_miss")
        self._kept[name] = key, make()
        return self._kept[name][1]

    def _is_own(self, source: Tensor) -> bool:
        return not source.is_inference() and any(p() is source for p in self._own)


def _state_of(x: Tensor) -> tuple[object, ...]:
    """Return what changes when a tensor is written or laid out anew."""
    place = x.untyped_storage().data_ptr(), x.storage_offset(), x.device
    return *place, version_of(x), x.shape, x.stride(), x.dtype


class Batched(AbstractExpertCompute):
    """Batched for equal counts without gradients, else as `others` computes them."""

    def __init__(
        self,
        cache: WeightCache | None = None,
        *,
        others: AbstractExpertCompute | None = None,
        tell: Tell = ran,
    ) -> None:
        self.cache, self.tell = cache, tell
        self.others = others or ByExpert()

    def forget(self) -> None:
        if self.cache is not None:
            self.cache.forget()

    def __call__(
        self,
        rows_MD: Tensor,
        w1_GFD: Tensor,
        w3_GFD: Tensor,
        w2_GDF: Tensor,
        counts_G: Tensor,
        counts_list: list[int] | None,
    ) -> Tensor:
        operands = rows_MD, w1_GFD, w3_GFD, w2_GDF
        if torch.is_grad_enabled() or not is_plain_cpu(*operands):
            return self.others(*operands, counts_G, counts_list)
        counts = counts_on_host(rows_MD, w1_GFD, counts_G, counts_list)
        if not counts or not counts[0] or len(set(counts)) > 1 or is_widened(rows_MD.dtype):
            return self.others(*operands, counts_G, counts)
        self.tell("batched_no_grad_experts")
        operands = in_autocast_dtype(*operands)
        with without_autocast(rows_MD):
            return self._batched(*operands)

    def _batched(self, rows_MD: Tensor, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        experts, hidden, dim = w1.shape
        rows_GcD = rows_MD.reshape(experts, -1, dim)
        w13_GHD = self._kept("w13", lambda: torch.cat([w1, w3], 1), w1, w3)
        w2_GFD = self._kept("w2_t", lambda: w2.mT.contiguous(), w2)
        both_GcH = torch.bmm(rows_GcD, w13_GHD.mT)
        hidden_GcF = silu(both_GcH[..., :hidden], inplace=True).mul_(both_GcH[..., hidden:])
        return torch.bmm(hidden_GcF, w2_GFD).reshape(-1, w2.shape[1])

    def _kept(self, name: str, make: Callable[[], Tensor], *sources: Tensor) -> Tensor:
        if self.cache is not None:
            return self.cache.get(name, make, sources, self.tell)
        return sources[0].mT if name == "w2_t" else make()
