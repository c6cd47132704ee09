"""Balance without an auxiliary loss: count tokens per expert, then move the bias.

Counts are added up forward by forward as they are, Partial on the axes that split tokens.
`update_expert_bias` sums them once per step, over exactly the axes that their type says.

The counts are no registered buffer. They are this rank's own summand, and DDP sends the
buffers of rank 0 to all ranks before each forward, which would overwrite them.

Steps are small, and in bfloat16 a step of 1e-3 at 1.0 is lost. So the bias is float32 at
least and the counts are int64, whatever a model is cast to and whatever is loaded.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from placements import (
    Mesh,
    On,
    Partial,
    Replicate,
    all_reduce,
    in_backward,
    in_transform,
    typed,
)
from spmd_moe.config import MoEConfig
from spmd_moe.dims import BiasE, CountsE
from spmd_moe.layouts import Layout
from spmd_moe.meshes import current_mesh_of, has_axis
from spmd_moe.parameters import Initialised, fill_

# Dtypes that each may take; what would give it another moves it and does not cast it.
_BIAS = (torch.float32, torch.float64)
_COUNTS = (torch.int64,)


@typed
class LoadBalance(Initialised):
    """The expert bias, and the counts of tokens since the bias last moved."""

    expert_bias_E: Annotated[BiasE, On("{self.layout.expert_bias_E}")]
    counts_E: Annotated[CountsE, On("{self.layout.counts_E}")]

    unregistered: ClassVar[tuple[str, ...]] = ("counts_E",)

    def __init__(
        self,
        config: MoEConfig,
        layout: Layout,
        mesh: Mesh,
        *,
        device: "torch.device | str | None" = None,
    ) -> None:
        super().__init__()
        self.layout, self.mesh = layout, mesh
        self.coeff = config.load_balance_coeff
        bias_E, counts_E = (
            torch.empty(config.num_experts, dtype=dtype, device=device)
            for dtype in (_BIAS[0], _COUNTS[0])
        )
        self.register_buffer("expert_bias_E", bias_E)
        self.counts_E = counts_E
        self.reset_own()

    def reset_own(self) -> None:
        fill_(self.expert_bias_E, 0)
        fill_(self.counts_E, 0)

    def converted(self, x: Tensor, convert: Callable[[Tensor], Tensor]) -> Tensor:
        """Move the state with the module; `.bfloat16()` and its like do not narrow it."""
        made = convert(x)
        allowed = _BIAS if x.is_floating_point() else _COUNTS
        return made if made.dtype in allowed else x.to(made.device)

    def before_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Widen a bias that is about to be assigned."""
        super().before_loading(state, prefix)
        bias_E = state.get(f"{prefix}expert_bias_E")
        if isinstance(bias_E, Tensor) and bias_E.dtype not in _BIAS:
            state[f"{prefix}expert_bias_E"] = bias_E.to(_BIAS[0])

    def after_loading(self, state: dict[str, Any], prefix: str) -> None:
        """Start the counts again after every load, whatever was loaded.

        The counts are not saved. After `to_empty` they would hold anything, and if the bias
        was assigned while they were on the meta device, nothing.
        """
        super().after_loading(state, prefix)
        self._follow_the_bias()
        fill_(self.counts_E, 0)

    def _follow_the_bias(self) -> None:
        """Bring the counts to the device of the bias, which FSDP2 moves as a buffer."""
        device, own_E = self.expert_bias_E.device, self.counts_E
        if own_E.device == device:
            return
        with torch.inference_mode(False):  # no training forward could add to what it makes
            nothing = own_E.is_meta
            self.counts_E = (
                torch.zeros_like(own_E, device=device) if nothing else own_E.to(device)
            )

    @typed
    def bias_for(self, scores_TE: Tensor) -> BiasE:
        """Return the bias in the dtype of the scores."""
        return self.expert_bias_E.to(scores_TE.dtype)

    @typed
    def record(self, counts_E: Annotated[CountsE, On("{self.layout.counts_E}")]) -> None:
        """Add the counts of a training forward, but not of a recomputation in backward."""
        if self.training and not in_backward():
            self._follow_the_bias()
            if in_transform():
                cast(Any, _Add).apply(counts_E, self)
            else:
                self.counts_E.add_(counts_E)

    @typed
    @torch.no_grad()
    def update(self) -> None:
        """counts Partial -> Replicate, then one step of the bias; the counts start again.

        Communicates: one all-reduce on every axis on which the counts are Partial.
        Raises TypeError if the bias was made narrower than float32, ValueError if the
        current mesh is not the dense one.
        """
        if self.expert_bias_E.dtype not in _BIAS:
            raise TypeError(
                f"expert_bias_E is {self.expert_bias_E.dtype}, in which small steps are "
                "lost: it must stay float32 or float64; cast the module, not the buffer"
            )
        self._follow_the_bias()
        mesh, counts_E = current_mesh_of(self.mesh.sizes), self.counts_E
        for axis, t in self.layout.counts_E.items():
            if isinstance(t, Partial) and has_axis(mesh, axis):
                counts_E = all_reduce(counts_E, axis, src=Partial(), dst=Replicate())
        self.expert_bias_E.add_(self.step(counts_E))
        self.counts_E.zero_()

    def step(self, counts_E: Tensor) -> Tensor:
        """Return the steps: up for experts below the mean, down above; they sum to zero.

        The side of the mean is computed in whole numbers, which no count is too large for.
        """
        assert self.coeff is not None
        side_E = (counts_E.sum() - counts_E * counts_E.shape[0]).sign()
        steps_E = side_E.to(self.expert_bias_E.dtype) * self.coeff
        return steps_E - steps_E.mean()


class _Add(torch.autograd.Function):
    """Adds counts inside a transform of torch.func, where nothing from outside is written.

    To a Function the transform hands the tensors that are below its own.
    """

    @staticmethod
    def forward(counts_E: Tensor, balance: LoadBalance) -> Tensor:
        balance.counts_E.add_(counts_E)
        return counts_E.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise RuntimeError(
            "vmap of the MoE layer: data decides how many rows an expert gets, so samples "
            "do not run side by side; call the layer for one after the other"
        )


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
