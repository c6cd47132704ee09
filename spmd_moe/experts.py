"""The experts: every row goes through the SwiGLU of its expert, or of the shared ones.

`GroupedExperts` are the routed experts. They see rows and know nothing of tokens.
`SharedExperts` are the dense feed-forward that every token takes beside them.
"""

from typing import Annotated, Any, Self

import torch
from torch.nn.functional import linear, silu

from placements import Mesh, On, typed
from spmd_moe.compute.by_expert import (
    AbstractExpertCompute,
    ByExpert,
    with_types_of_plain,
)
from spmd_moe.config import MoEConfig
from spmd_moe.dims import DH, GDF, GFD, HD, MD, TD, CountsG
from spmd_moe.layouts import Layout
from spmd_moe.parameters import Initialised, Spec


@typed
class GroupedExperts(Initialised):
    """The experts that this rank holds, each w2 (silu(w1 x) * (w3 x)).

    `mesh` is the mesh that the weights' types are about: sparse with EP, dense without. It
    must be current when the module is called. `compute` is how the rows are computed; a
    strategy of `compute/` may be put in its place.
    """

    compute: AbstractExpertCompute

    w1_GFD: Annotated[GFD, On("{self.layout.w13_GFD}")]
    w3_GFD: Annotated[GFD, On("{self.layout.w13_GFD}")]
    w2_GDF: Annotated[GDF, On("{self.layout.w2_GDF}")]

    def __init__(
        self,
        config: MoEConfig,
        layout: Layout,
        mesh: Mesh,
        *,
        seed: int = 0,
        device: "torch.device | str | None" = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.compute = ByExpert()
        experts, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        w13 = Spec((experts, hidden, dim), layout.w13_GFD, mesh)
        w2 = Spec((experts, dim, hidden), layout.w2_GDF, mesh)
        specs = {"w1_GFD": w13, "w3_GFD": w13, "w2_GDF": w2}
        self.declare_specs(specs, seed, device=device, dtype=dtype)
        self.reset_own()

    def after_loading(self, state: dict[str, Any], prefix: str) -> None:
        super().after_loading(state, prefix)
        self.compute.forget()

    def train(self, mode: bool = True) -> Self:
        """Set training mode; the weights may then be written at any time."""
        if mode:
            self.compute.forget()
        return super().train(mode)

    def forward(
        self,
        rows_MD: Annotated[MD, On("{self.layout.rows}")],
        counts_G: CountsG,
        counts_list: list[int] | None = None,
    ) -> Annotated[MD, On("{self.layout.computed}")]:
        """rows by expert, and how many each has -> rows; Partial where F is cut.

        `counts_list` are the numbers of `counts_G` where the host knows them already.
        Communicates nothing. Backward: every expert gets a gradient, zero without rows.
        """
        weights = self.w1_GFD, self.w3_GFD, self.w2_GDF
        return with_types_of_plain(self.compute, rows_MD, *weights, counts_G, counts_list)


@typed
class SharedExperts(Initialised):
    """w2 (silu(w1 x) * (w3 x)), hidden units cut over tp."""

    w1_HD: Annotated[HD, On("{self.layout.shared_w13_HD}")]
    w3_HD: Annotated[HD, On("{self.layout.shared_w13_HD}")]
    w2_DH: Annotated[DH, On("{self.layout.shared_w2_DH}")]

    def __init__(
        self,
        config: MoEConfig,
        layout: Layout,
        mesh: Mesh,
        *,
        seed: int = 0,
        device: "torch.device | str | None" = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        dim, hidden = config.dim, config.shared_hidden_dim
        w13 = Spec((hidden, dim), layout.shared_w13_HD, mesh)
        w2 = Spec((dim, hidden), layout.shared_w2_DH, mesh)
        specs = {"w1_HD": w13, "w3_HD": w13, "w2_DH": w2}
        self.declare_specs(specs, seed, device=device, dtype=dtype)
        self.reset_own()

    def forward(
        self, x_TD: Annotated[TD, On("{self.layout.shared_input}")]
    ) -> Annotated[TD, On("{self.layout.shared_output}")]:
        """Replicate -> Partial on tp. Communicates nothing."""
        hidden_TH = silu(linear(x_TD, self.w1_HD)) * linear(x_TD, self.w3_HD)
        return linear(hidden_TH, self.w2_DH)
