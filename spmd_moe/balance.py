"""Balance without an auxiliary loss: count tokens per expert, then move the bias.

Counts are added up forward by forward as they are, Partial on the axes that split tokens.
`update_expert_bias` sums them once per step, over exactly the axes that their type says.
"""

from collections.abc import Iterable
from typing import Annotated, cast

import torch
from torch import Tensor, nn

from placements import On, Partial, Replicate, all_reduce, typed
from placements.torch_private import in_backward
from spmd_moe.config import MoEConfig
from spmd_moe.dims import CountsE, FloatE
from spmd_moe.layouts import Layout


@typed
class LoadBalance(nn.Module):
    """The expert bias, and the counts since it last moved."""

    expert_bias_E: Annotated[FloatE, On("{self.layout.expert_bias_E}")]
    counts_E: Annotated[CountsE, On("{self.layout.counts_E}")]

    def __init__(self, config: MoEConfig, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self.coeff = config.load_balance_coeff
        self.register_buffer("expert_bias_E", torch.zeros(config.num_experts))
        counts_E = torch.zeros(config.num_experts, dtype=torch.int64)
        self.register_buffer("counts_E", counts_E, persistent=False)

    @typed
    def bias_for(self, scores_TE: Tensor) -> FloatE:
        """The bias, in the dtype of the scores."""
        return self.expert_bias_E.to(scores_TE.dtype)

    @typed
    def record(self, counts_E: Annotated[CountsE, On("{self.layout.counts_E}")]) -> None:
        """Add up the counts of a training forward; a recomputation in backward is none."""
        if self.training and not in_backward():
            self.counts_E.add_(counts_E)

    @typed
    @torch.no_grad()
    def update(self) -> None:
        """counts Partial -> Replicate, then one step of the bias; the counts start again.

        Communicates: one all-reduce on every axis on which the counts are Partial.
        """
        counts_E: Tensor = self.counts_E
        for axis, t in self.layout.counts_E.items():
            if isinstance(t, Partial):
                counts_E = all_reduce(counts_E, axis, src=Partial(), dst=Replicate())
        self.expert_bias_E.add_(self.step(counts_E.to(self.expert_bias_E.dtype)))
        self.counts_E.zero_()

    def step(self, counts_E: Tensor) -> Tensor:
        """Up for experts below the mean, down above; the steps sum to zero."""
        assert self.coeff is not None
        steps_E = (counts_E.mean() - counts_E).sign() * self.coeff
        return steps_E - steps_E.mean()


def update_expert_bias(module: nn.Module) -> None:
    """Move the bias of every MoE layer in `module`; call it once per optimizer step.

    Raises ValueError if some layers have a load_balance_coeff and others do not.
    """
    every = cast(Iterable[tuple[str, nn.Module]], module.named_modules())
    found = {name: m for name, m in every if isinstance(m, LoadBalance)}
    without = [name for name, balance in found.items() if balance.coeff is None]
    if without and len(without) < len(found):
        raise ValueError(
            f"load_balance_coeff (None) of {without[0]!r} must be set, as other layers "
            "have it: set it for all MoE layers or for none"
        )
    for balance in found.values():
        if balance.coeff is not None:
            balance.update()
