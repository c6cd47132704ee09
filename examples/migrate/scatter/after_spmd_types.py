"""It knows no pieces of unequal length: pad, cut evenly, and mask the map by hand."""

import spmd_types as spmd
import torch
from torch import Tensor
from torch.nn.functional import pad

from examples.migrate.scatter.one_device import chosen_experts
from placements.testing import device_mesh


def route(x: Tensor, gate: Tensor, counted: int) -> tuple[Tensor, Tensor]:
    """Route the tokens; of them and the padding behind, the first `counted` rows count."""
    spmd.assert_type(x, {"tp": spmd.I})
    spmd.assert_type(gate, {"tp": spmd.I})
    tokens = x.shape[0]
    padded = pad(x, (0, 0, 0, -tokens % device_mesh().size()))
    does_count = spmd.assert_type(torch.arange(padded.shape[0]) < counted, {"tp": spmd.R})
    mine = spmd.convert(padded, "tp", src=spmd.I, dst=spmd.S(0))
    scores = mine @ spmd.convert(gate, "tp", src=spmd.I, dst=spmd.R)
    counts_here = spmd.convert(does_count, "tp", src=spmd.R, dst=spmd.S(0))
    chosen = chosen_experts(scores) * counts_here.unsqueeze(1)
    counts = spmd.all_reduce(chosen.sum(0), "tp", src=spmd.P, dst=spmd.I).long()
    gates = spmd.all_gather(scores * chosen, "tp", src=spmd.S(0), dst=spmd.I)
    return gates[:tokens], counts


def program(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return route(x, gate, counted=x.shape[0])
