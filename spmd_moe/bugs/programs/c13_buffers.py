"""C13: a buffer that is replaced, while somebody else still holds the old one."""

# torch does not type `register_buffer` and `state_dict`:
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor, nn

from placements import I, P, R, S, all_reduce, declare
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

SCORES_TE = numbers(6, 4)


class Balance(nn.Module):
    """An expert bias that moves by the counts of each step."""

    bias_E: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias_E", torch.zeros(4).double())

    def forward(self, scores_TE: Tensor) -> Tensor:
        return scores_TE + self.bias_E

    def move(self, counts_E: Tensor) -> None:
        self.bias_E.add_((counts_E.mean() - counts_E).sign())


class Reassigning(Balance):
    """As `Balance`, but the bias is a new tensor after each step."""

    def move(self, counts_E: Tensor) -> None:
        self.bias_E = self.bias_E + (counts_E.mean() - counts_E).sign()


def saved_bias(balance: Balance) -> Results:
    """What a checkpointer saves that took its references before training."""
    declare(balance, {"bias_E": {"dp": R}})
    scores_TE = mine(SCORES_TE, {"dp": S(0)}, grad=True)
    chosen_TE = balance(scores_TE)
    checkpoint: dict[str, Tensor] = balance.state_dict()
    counts_E = all_reduce((chosen_TE.detach() > 0).sum(0), "dp", src=P, dst=R)
    balance.move(counts_E.double())
    loss = (balance(scores_TE) ** 2).sum()
    all_reduce(loss, "dp", src=P, dst=I).backward()
    return {"bias_E": checkpoint["bias_E"], "scores.grad": scores_TE.grad}


@bug(
    "B73",
    "torchtitan #1226",
    "C13",
    "the expert bias is assigned anew, and the checkpoint keeps zeros",
    mesh={"dp": 2},
    refused=Refused(TYPES, None, "bias_E", "hold the registered tensor"),
    results={"bias_E": {"dp": R}, "scores.grad": {"dp": S(0)}},
)
class NewBuffer:
    @staticmethod
    def one_device() -> Results:
        balance, scores_TE = Balance(), SCORES_TE.clone().requires_grad_()
        balance.move((balance.forward(scores_TE) > 0).sum(0).double())
        (balance.forward(scores_TE) ** 2).sum().backward()
        return {"bias_E": balance.bias_E, "scores.grad": scores_TE.grad}

    @staticmethod
    def wrong() -> Results:
        return saved_bias(Reassigning())

    @staticmethod
    def right() -> Results:
        return saved_bias(Balance())


BUGS = (NewBuffer,)
