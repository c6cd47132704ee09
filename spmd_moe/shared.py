"""SharedExperts: the dense feed-forward that every token takes beside the routed ones."""

from typing import Annotated

import torch
from torch.nn.functional import linear, silu

from placements import Mesh, On, typed
from spmd_moe.config import MoEConfig
from spmd_moe.dims import DH, HD, TD
from spmd_moe.initialise import Initialised, Spec
from spmd_moe.layouts import Layout


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
