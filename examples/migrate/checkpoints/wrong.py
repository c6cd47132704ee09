"""Every rank numbers its experts from zero, so all ranks write the same names, and one
wins. Who resumes gets the same experts on all ranks, and no error (B74: KempnerForge #202).
What is saved under one name must be the same everywhere, that is Replicate; the values
are compared when it is saved, and on other meshes names would not even fit."""

import spmd_types as spmd
import torch
from torch import Tensor, nn

from examples.migrate.checkpoints.after_spmd_types import save
from examples.migrate.checkpoints.before import saved
from placements import (
    R,
    S,
    V,
    declare,
    global_state_dict,
    load_global_state_dict,
    reinterpret,
)


def before(w: Tensor) -> Tensor:
    checkpoint = saved({f"experts.{e}": x for e, x in enumerate(w.detach())})
    return torch.stack([checkpoint[f"experts.{e}"] for e in range(len(w))])


class Experts(nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.experts = nn.ParameterList(w.unbind())
        declare(self, {f"experts.{e}": {"ep": R} for e in range(len(self.experts))})


def after_placements(w: Tensor) -> Tensor:
    own = reinterpret(w.detach(), "ep", src=S(0), dst=V)
    checkpoint = global_state_dict(Experts(own))
    resumed = Experts(torch.zeros_like(own))
    load_global_state_dict(resumed, checkpoint)
    return torch.stack(list(resumed.experts)).detach()


def after_spmd_types(w: Tensor) -> Tensor:
    spmd.assert_type(w, {"ep": spmd.S(0)})
    mine: dict[str, Tensor] = {}
    for e, expert in enumerate(w.detach()):
        save(mine, f"experts.{e}", expert)
    checkpoint = saved(mine)
    return torch.stack([checkpoint[f"experts.{e}"] for e in range(len(w))])
