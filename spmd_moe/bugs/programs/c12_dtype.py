"""C12: scores that lost their precision before the choice that depends on it."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

from typing import Annotated

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from placements import I, On, P, R, S, all_reduce, typed
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

X_TD = numbers(6, 4).to(torch.bfloat16)
GATE_DE = (numbers(4, 3, seed=1) + 2.0**-5).to(torch.bfloat16)


@typed
def top_scores(
    logits_TE: Annotated[Float32[Tensor, "T E"], On(tp="t")],
) -> Annotated[Float[Tensor, "T 1"], On(tp="t")]:
    """The best score of each token; ties that rounding made would change the choice."""
    return logits_TE.topk(1, dim=1).values


@bug(
    "B70",
    "SGLang #33764",
    "C12",
    "router logits come out of a bf16 product",
    mesh={"tp": 2},
    refused=Refused(TYPES, None, "logits_TE", "annotation"),
    results={"top_T1": {"tp": S(0)}, "gate.grad": {"tp": P}},
)
class NarrowLogits:
    @staticmethod
    def one_device() -> Results:
        gate_DE = GATE_DE.clone().requires_grad_()
        top_T1 = (X_TD.float() @ gate_DE.float()).topk(1, dim=1).values
        top_T1.sum().backward()
        return {"top_T1": top_T1.detach(), "gate.grad": gate_DE.grad}

    @staticmethod
    def wrong() -> None:
        x_TD = mine(X_TD, {"tp": S(0)})
        gate_DE = mine(GATE_DE, {"tp": R}, grad=True)
        logits_TE = x_TD @ gate_DE
        top_T1 = top_scores(logits_TE)
        all_reduce(top_T1.sum(), "tp", src=P, dst=I).backward()

    @staticmethod
    def right() -> Results:
        x_TD = mine(X_TD, {"tp": S(0)})
        gate_DE = mine(GATE_DE, {"tp": R}, grad=True)
        logits_TE = x_TD.float() @ gate_DE.float()
        top_T1 = top_scores(logits_TE)
        all_reduce(top_T1.sum(), "tp", src=P, dst=I).backward()
        return {"top_T1": top_T1, "gate.grad": gate_DE.grad}


BUGS = (NarrowLogits,)
