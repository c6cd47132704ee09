"""C11: ranks that draw alike where they must not, or apart where they must not."""

# torch does not type `backward` and `manual_seed`:
# pyright: reportUnknownMemberType=false

import torch
from torch.nn.functional import dropout

from placements import I, P, S, all_reduce, axis_rank
from spmd_moe.bugs.record import VERIFY, Refused, Results, bug, mine, numbers

X_LD = numbers(8, 6)
SEED = 5


@bug(
    "B68",
    "Megatron-LM #1256",
    "C11",
    "dropout draws the same mask for the different tokens of each tp rank",
    mesh={"tp": 2},
    refused=Refused(VERIFY, "tp", "x_LD", "different rows need different numbers"),
    results={"y_LD": {"tp": S(0)}, "x.grad": {"tp": S(0)}},
)
class EqualMasks:
    @staticmethod
    def one_device() -> Results:
        x_LD = X_LD.clone().requires_grad_()
        pieces = [
            dropout(piece, 0.5)
            for rank, piece in enumerate(x_LD.chunk(2))
            if torch.manual_seed(SEED + rank)
        ]
        y_LD = torch.cat(pieces)
        (y_LD**2).sum().backward()
        return {"y_LD": y_LD.detach(), "x.grad": x_LD.grad}

    @staticmethod
    def wrong() -> Results:
        x_LD = mine(X_LD, {"tp": S(0)}, grad=True)
        torch.manual_seed(SEED)  # the fork of the generator by rank was not entered
        y_LD = dropout(x_LD, 0.5)
        all_reduce((y_LD**2).sum(), "tp", src=P, dst=I).backward()
        return {"y_LD": y_LD, "x.grad": x_LD.grad}

    @staticmethod
    def right() -> Results:
        x_LD = mine(X_LD, {"tp": S(0)}, grad=True)
        torch.manual_seed(SEED + axis_rank("tp"))
        y_LD = dropout(x_LD, 0.5)
        all_reduce((y_LD**2).sum(), "tp", src=P, dst=I).backward()
        return {"y_LD": y_LD, "x.grad": x_LD.grad}


BUGS = (EqualMasks,)
