"""GroupedExperts: every row through the SwiGLU of its expert. Knows nothing of tokens."""

from typing import Annotated

import torch
from torch.nn.functional import silu

from placements import Mesh, On, typed
from spmd_moe.config import MoEConfig
from spmd_moe.dims import GDF, GFD, MD, CountsG
from spmd_moe.grouped_mm import ends_of, grouped_mm
from spmd_moe.initialise import Initialised, Spec
from spmd_moe.layouts import Layout


@typed
class GroupedExperts(Initialised):
    """The experts that this rank holds, each w2 (silu(w1 x) * (w3 x)).

    `mesh` is the mesh that the weights' types are about: sparse with EP, dense without. It
    must be current when the module is called.
    """

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
        experts, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        w13 = Spec((experts, hidden, dim), layout.w13_GFD, mesh)
        w2 = Spec((experts, dim, hidden), layout.w2_GDF, mesh)
        specs = {"w1_GFD": w13, "w3_GFD": w13, "w2_GDF": w2}
        self.declare_specs(specs, seed, device=device, dtype=dtype)
        self.reset_own()

    def forward(
        self, rows_MD: Annotated[MD, On("{self.layout.rows}")], counts_G: CountsG
    ) -> Annotated[MD, On("{self.layout.computed}")]:
        """rows by expert, and how many each has -> rows; Partial where F is cut.

        Communicates nothing. Backward: every expert gets a gradient, zero without rows.
        """
        ends_G = ends_of(counts_G)
        gate_MF = silu(grouped_mm(rows_MD, self.w1_GFD.mT, ends_G))
        hidden_MF = gate_MF * grouped_mm(rows_MD, self.w3_GFD.mT, ends_G)
        return grouped_mm(hidden_MF, self.w2_GDF.mT, ends_G)
