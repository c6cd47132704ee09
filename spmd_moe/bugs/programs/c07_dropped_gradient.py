"""C7: a collective that autograd does not see cuts the gradient off."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

import torch
import torch.distributed as dist

from placements import I, P, R, S, all_gather, all_reduce, assert_type, convert
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

X_TD, GATE_DE, W_DE = numbers(6, 4), numbers(4, 3, seed=1), numbers(4, 3, seed=2)


@bug(
    "B50",
    "NeMo Automodel #2995",
    "C7",
    "the router's weights are gathered by a collective without a backward",
    mesh={"ep": 3},
    refused=Refused(TYPES, "ep", "probs_TE", "without saying how"),
    results={"y_TE": {"ep": S(1)}, "gate.grad": {"ep": P}, "x.grad": {"ep": S(0)}},
)
class PlainGather:
    @staticmethod
    def one_device() -> Results:
        x_TD, gate_DE = X_TD.clone().requires_grad_(), GATE_DE.clone().requires_grad_()
        y_TE = (x_TD @ W_DE) * (x_TD @ gate_DE)
        y_TE.sum().backward()
        return {"y_TE": y_TE.detach(), "gate.grad": gate_DE.grad, "x.grad": x_TD.grad}

    @staticmethod
    def wrong() -> None:
        x_TD = mine(X_TD, {"ep": S(0)}, grad=True)
        gate_DE = mine(GATE_DE, {"ep": R}, grad=True)
        probs_TE = x_TD @ gate_DE
        pieces = [torch.zeros(2, 3).double() for _ in range(3)]
        dist.all_gather(pieces, probs_TE)
        all_probs_TE = assert_type(torch.cat(pieces), {"ep": R})
        full_TD = all_gather(x_TD, "ep", src=S(0), dst=R)
        mine_TE = convert(all_probs_TE, "ep", src=R, dst=S(1))
        y_TE = (full_TD @ mine(W_DE, {"ep": S(1)})) * mine_TE
        all_reduce(y_TE.sum(), "ep", src=P, dst=I).backward()

    @staticmethod
    def right() -> Results:
        x_TD = mine(X_TD, {"ep": S(0)}, grad=True)
        gate_DE = mine(GATE_DE, {"ep": R}, grad=True)
        probs_TE = x_TD @ gate_DE
        all_probs_TE = all_gather(probs_TE, "ep", src=S(0), dst=R)
        full_TD = all_gather(x_TD, "ep", src=S(0), dst=R)
        mine_TE = convert(all_probs_TE, "ep", src=R, dst=S(1))
        y_TE = (full_TD @ mine(W_DE, {"ep": S(1)})) * mine_TE
        all_reduce(y_TE.sum(), "ep", src=P, dst=I).backward()
        return {"y_TE": y_TE, "gate.grad": gate_DE.grad, "x.grad": x_TD.grad}


BUGS = (PlainGather,)
