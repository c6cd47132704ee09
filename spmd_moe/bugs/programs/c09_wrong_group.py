"""C9: a rank, a group or a norm of another axis than the one that is meant."""

# torch does not type `backward` and its clipping:
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor, nn

from placements import (
    I,
    P,
    R,
    S,
    all_gather,
    all_reduce,
    axis_rank,
    clip_grad_norm_,
    convert,
    declare,
)
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

X_TD, V_TD = numbers(6, 3), numbers(6, 3, seed=1)
EVERYWHERE = {"ep": I, "tp": I}


def square() -> Results:
    x_TD = X_TD.clone().requires_grad_()
    y_TD = x_TD**2
    (y_TD * V_TD).sum().backward()
    return {"y_TD": y_TD.detach(), "x.grad": x_TD.grad}


@bug(
    "B58",
    "torchtitan #2842",
    "C9",
    "tokens are to be split over tp, by this rank's number on ep",
    mesh={"ep": 2, "tp": 3},
    refused=Refused(TYPES, "tp", "y_TD", "src must be the type"),
    results={"y_TD": EVERYWHERE, "x.grad": {"ep": R, "tp": P}},
)
class RankOfAnotherAxis:
    one_device = staticmethod(square)

    @staticmethod
    def wrong() -> None:
        x_TD = mine(X_TD, {"ep": R, "tp": R}, grad=True)
        mine_TD = x_TD.chunk(3)[axis_rank("ep")]
        y_TD = mine_TD**2
        full_TD = all_gather(y_TD, "tp", src=S(0), dst=I)
        (full_TD * mine(V_TD, {"ep": R, "tp": I})).sum().backward()

    @staticmethod
    def right() -> Results:
        x_TD = mine(X_TD, {"ep": I, "tp": R}, grad=True)
        mine_TD = convert(x_TD, "tp", src=R, dst=S(0))
        y_TD = mine_TD**2
        full_TD = all_gather(y_TD, "tp", src=S(0), dst=I)
        (full_TD * mine(V_TD, EVERYWHERE)).sum().backward()
        return {"y_TD": full_TD, "x.grad": x_TD.grad}


@bug(
    "B60",
    "Megatron-LM #7452, finding 7",
    "C9",
    "a sequence is scattered over one group and gathered over another",
    mesh={"pp": 2, "tp": 2},
    refused=Refused(TYPES, "tp", "y_TD", "src must be the type"),
    results={"y_TD": {"pp": I, "tp": I}, "x.grad": {"pp": I, "tp": I}},
)
class ScatterOverAnotherGroup:
    one_device = staticmethod(square)

    @staticmethod
    def wrong() -> None:
        x_TD = mine(X_TD, {"pp": I, "tp": I}, grad=True)
        mine_TD = convert(x_TD, "pp", src=I, dst=S(0))
        y_TD = mine_TD**2
        full_TD = all_gather(y_TD, "tp", src=S(0), dst=I)
        (full_TD * mine(V_TD, {"pp": I, "tp": I})).sum().backward()

    @staticmethod
    def right() -> Results:
        x_TD = mine(X_TD, {"pp": I, "tp": I}, grad=True)
        mine_TD = convert(x_TD, "tp", src=I, dst=S(0))
        y_TD = mine_TD**2
        full_TD = all_gather(y_TD, "tp", src=S(0), dst=I)
        (full_TD * mine(V_TD, {"pp": I, "tp": I})).sum().backward()
        return {"y_TD": full_TD, "x.grad": x_TD.grad}


SCORES_TH, SINK_H = numbers(5, 6), numbers(6, seed=1)


class Sinks(nn.Module):
    """A learnable sink for every attention head that this rank holds."""

    def __init__(self, sink_H: Tensor) -> None:
        super().__init__()
        self.sink_H = nn.Parameter(sink_H)

    def forward(self, scores_TH: Tensor) -> Tensor:
        return (scores_TH - self.sink_H) ** 2


@bug(
    "B62",
    "Megatron-LM #7452, #7530",
    "C9",
    "a parameter cut over heads counts as a copy in the gradient norm",
    mesh={"tp": 3},
    refused=Refused(TYPES, "tp", "sink_H", "one operand is cut along this dim"),
    results={"norm": {"tp": R}, "sink.grad": {"tp": S(0)}},
)
class SinksInTheNorm:
    @staticmethod
    def one_device() -> Results:
        sinks = Sinks(SINK_H.clone())
        sinks.forward(SCORES_TH).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(sinks.parameters(), 1.0)
        return {"norm": norm, "sink.grad": sinks.sink_H.grad}

    @staticmethod
    def wrong() -> None:
        scores_TH = mine(SCORES_TH, {"tp": S(1)})
        sinks = Sinks(mine(SINK_H, {"tp": S(0)}))
        declare(sinks, {"sink_H": {"tp": R}})
        y_TH = sinks(scores_TH)
        all_reduce(y_TH.sum(), "tp", src=P, dst=I).backward()
        clip_grad_norm_(sinks, 1.0)

    @staticmethod
    def right() -> Results:
        scores_TH = mine(SCORES_TH, {"tp": S(1)})
        sinks = Sinks(mine(SINK_H, {"tp": S(0)}))
        declare(sinks, {"sink_H": {"tp": S(0)}})
        y_TH = sinks(scores_TH)
        all_reduce(y_TH.sum(), "tp", src=P, dst=I).backward()
        norm = clip_grad_norm_(sinks, 1.0)
        return {"norm": norm, "sink.grad": sinks.sink_H.grad}


BUGS = (RankOfAnotherAxis, ScatterOverAnotherGroup, SinksInTheNorm)
