"""C1: a wrapper around the layer decides by itself whose gradients are summed."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

from torch import Tensor, nn
from torch.nn.functional import silu
from torch.nn.utils import clip_grad_norm_ as clip_on_one_device

from placements import (
    I,
    P,
    Padded,
    R,
    S,
    all_reduce,
    clip_grad_norm_,
    convert,
    declare,
    reduce_gradients,
    region,
)
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

X_TD, W1_DF, W2_FD = numbers(5, 4), numbers(4, 6, seed=1), numbers(6, 4, seed=2)
EXPERT_PARALLEL = False


def experts(x_TD: Tensor, w1_DF: Tensor, w2_FD: Tensor) -> Tensor:
    """Cut over tp along F; the output is still to be summed."""
    return silu(x_TD @ w1_DF) @ w2_FD


@bug(
    "B03",
    "torchtitan #4054",
    "C1",
    "without EP a region's gradient layout defaults to the forward one",
    mesh={"tp": 3},
    refused=Refused(TYPES, "tp", "x_TD", "the dual of its type"),
    results={"y_TD": {"tp": I}, "x.grad": {"tp": I}},
)
class RegionGradient:
    @staticmethod
    def one_device() -> Results:
        x_TD = X_TD.clone().requires_grad_()
        y_TD = experts(x_TD, W1_DF, W2_FD)
        y_TD.square().sum().backward()
        return {"y_TD": y_TD, "x.grad": x_TD.grad}

    @staticmethod
    def wrong() -> None:
        leaf_TD = mine(X_TD, {"tp": I}, grad=True)
        w1_DF, w2_FD = mine(W1_DF, {"tp": S(1)}), mine(W2_FD, {"tp": S(0)})
        weights = [{"tp": S(1)}, {"tp": S(0)}]
        x_TD = convert(leaf_TD, "tp", src=I, dst=R)
        run = region(
            experts,
            ins=[{"tp": R}, *weights],
            grads=[{"tp": P if EXPERT_PARALLEL else R}, *weights],
            outs={"tp": P},
        )
        y_TD = all_reduce(run(x_TD, w1_DF, w2_FD), "tp", src=P, dst=I)
        y_TD.square().sum().backward()

    @staticmethod
    def right() -> Results:
        leaf_TD = mine(X_TD, {"tp": I}, grad=True)
        w1_DF, w2_FD = mine(W1_DF, {"tp": S(1)}), mine(W2_FD, {"tp": S(0)})
        weights = [{"tp": S(1)}, {"tp": S(0)}]
        x_TD = convert(leaf_TD, "tp", src=I, dst=R)
        run = region(
            experts,
            ins=[{"tp": R}, *weights],
            grads=[{"tp": P}, *weights],
            outs={"tp": P},
        )
        y_TD = all_reduce(run(x_TD, w1_DF, w2_FD), "tp", src=P, dst=I)
        y_TD.square().sum().backward()
        return {"y_TD": y_TD, "x.grad": leaf_TD.grad}


# Two dp ranks with five tokens each, which tp cuts into three and two.
BATCH_TD = numbers(10, 4, seed=3)
TOKENS = {"dp": S(0), "tp": S(0, Padded(5))}
WHOLE = {"dp": R, "tp": R}


class NormAndRouter(nn.Module):
    """What a block computes under sequence parallelism, up to the router's logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_D = nn.Parameter(numbers(4, seed=4))
        self.gate_DE = nn.Parameter(numbers(4, 3, seed=5))
        declare(self, {"norm_D": WHOLE, "gate_DE": WHOLE})

    def forward(self, x_TD: Tensor) -> Tensor:
        return (x_TD * self.norm_D) @ self.gate_DE


@bug(
    "B06",
    "Megatron-LM #599, #619",
    "C1",
    "the router lacks the flag that sums its gradient over tp under SP",
    mesh={"dp": 2, "tp": 2},
    refused=Refused(TYPES, "tp", "gate_DE", "each rank holds one summand"),
    results={
        "logits_TE": TOKENS,
        "gate.grad": WHOLE,
        "norm.grad": WHOLE,
        "total": WHOLE,
    },
)
class UnflaggedRouter:
    @staticmethod
    def one_device() -> Results:
        block = NormAndRouter()
        logits_TE = block(BATCH_TD)
        logits_TE.square().sum().backward()
        total = clip_on_one_device(block.parameters(), 1.0)
        grads = {"gate.grad": block.gate_DE.grad, "norm.grad": block.norm_D.grad}
        return {"logits_TE": logits_TE, "total": total, **grads}

    @staticmethod
    def wrong() -> None:
        block = NormAndRouter()
        block(mine(BATCH_TD, TOKENS)).square().sum().backward()
        flagged = {"norm_D"}
        for name, parameter in block.named_parameters():
            assert parameter.grad is not None
            parameter.grad = all_reduce(parameter.grad, "dp", src=P, dst=R)
            if name in flagged:
                parameter.grad = all_reduce(parameter.grad, "tp", src=P, dst=R)
        clip_grad_norm_(block, 1.0)

    @staticmethod
    def right() -> Results:
        block = NormAndRouter()
        logits_TE = block(mine(BATCH_TD, TOKENS))
        logits_TE.square().sum().backward()
        reduce_gradients(block)
        total = clip_grad_norm_(block, 1.0)
        grads = {"gate.grad": block.gate_DE.grad, "norm.grad": block.norm_D.grad}
        return {"logits_TE": logits_TE, "total": total, **grads}


BUGS = (RegionGradient, UnflaggedRouter)
