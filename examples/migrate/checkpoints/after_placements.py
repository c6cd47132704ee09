"""The experts of a rank are one tensor, which is declared cut over `ep`. The checkpoint has
the global tensor, and loading cuts it, on this mesh or on another. (`sharded_state_dict`
does so without a rank that has all of it; see docs/checkpoints.md.)"""

import torch
from torch import Tensor, nn

from placements import S, declare, global_state_dict, load_global_state_dict


class Experts(nn.Module):
    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(w.detach())
        declare(self, {"w": {"ep": S(0)}})


def program(w: Tensor) -> Tensor:
    checkpoint = global_state_dict(Experts(w))
    resumed = Experts(torch.zeros_like(w))
    load_global_state_dict(resumed, checkpoint)
    return resumed.w.detach()
