"""It saves nothing, so the rule is written by hand: what goes under one name is the same on
all ranks. Gather by the type, save what is whole, cut again. A checker looks at it if one
is on while the trainer saves."""

import spmd_types as spmd
import torch
from torch import Tensor


def save(checkpoint: dict[str, Tensor], name: str, x: Tensor) -> None:
    checkpoint[name] = spmd.assert_type(x, {"ep": spmd.R})


def program(w: Tensor) -> Tensor:
    spmd.assert_type(w, {"ep": spmd.S(0)})
    checkpoint: dict[str, Tensor] = {}
    whole = spmd.all_gather(w.detach(), "ep", src=spmd.S(0), dst=spmd.R)
    for e, expert in enumerate(whole):
        save(checkpoint, f"experts.{e}", expert)
    experts = torch.stack([checkpoint[f"experts.{e}"] for e in range(len(whole))])
    return spmd.convert(experts, "ep", src=spmd.R, dst=spmd.S(0))
