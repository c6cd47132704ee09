"""C4: auxiliary losses, token counts and the expert bias, over the wrong set of tokens."""

# torch does not type `backward` and the collectives:
# pyright: reportUnknownMemberType=false

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from placements import (
    I,
    P,
    Padded,
    R,
    S,
    all_reduce,
    declare,
    global_mean,
    reduce_gradients,
)
from placements.testing import device_mesh
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

# Ten tokens, five on each dp rank, which tp cuts into three and two; four experts. The
# fractions keep the choice of experts free of ties.
X_TD = numbers(10, 3) + torch.linspace(0, 0.5, 30).double().view(10, 3)
LABELS_T = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0, 0, 2])
TOP_K, NUM_EXPERTS, NUM_TOKENS = 2, 4, 10
TOKENS = {"dp": S(0), "tp": S(0, Padded(5))}
WHOLE = {"dp": R, "tp": R}
AXES = ("dp", "tp")


class Gate(nn.Module):
    """Replicated; every rank routes its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.w_DE = nn.Parameter(numbers(3, NUM_EXPERTS, seed=1))
        declare(self, {"w_DE": WHOLE})

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD @ self.w_DE


def counts_of(probs_TE: Tensor) -> Tensor:
    """How many of these tokens chose each expert."""
    ids_TK = probs_TE.detach().topk(TOP_K, 1).indices
    return torch.bincount(ids_TK.flatten(), minlength=NUM_EXPERTS).double()


def summed(counts: Tensor, *axes: str) -> Tensor:
    for axis in axes:
        counts = all_reduce(counts, axis, src=P, dst=R)
    return counts


def balance_loss(probs_TE: Tensor, counts_E: Tensor, num_tokens: int) -> Tensor:
    """These tokens' share of the loss over all tokens, given the counts of all."""
    return NUM_EXPERTS * (probs_TE.sum(0) * counts_E).sum() / num_tokens**2


@bug(
    "B26",
    "Megatron-LM #3672, #3768, #3769",
    "C4",
    "the shares of a global auxiliary loss meet a wrapper that averages",
    mesh={"dp": 2, "tp": 2},
    refused=Refused(TYPES, "dp", "grad_DE", "reductions are sums"),
    results={"aux": {"dp": P, "tp": P}, "gate.grad": WHOLE},
)
class AveragedShares:
    # With a typed sum and a division by hand it type-checks; as B11, it is then refused
    # by the comparison with one device.
    @staticmethod
    def one_device() -> Results:
        gate = Gate()
        probs_TE = gate(X_TD).softmax(1)
        aux = balance_loss(probs_TE, counts_of(probs_TE), NUM_TOKENS)
        aux.backward()
        return {"aux": aux, "gate.grad": gate.w_DE.grad}

    @staticmethod
    def wrong() -> None:
        gate = Gate()
        probs_TE = gate(mine(X_TD, TOKENS)).softmax(1)
        balance_loss(probs_TE, summed(counts_of(probs_TE), *AXES), NUM_TOKENS).backward()
        grad_DE = gate.w_DE.grad
        assert grad_DE is not None
        grad_DE = all_reduce(grad_DE, "tp", src=P, dst=R)
        dist.all_reduce(grad_DE, op=dist.ReduceOp.AVG, group=device_mesh().get_group("dp"))

    @staticmethod
    def right() -> Results:
        gate = Gate()
        probs_TE = gate(mine(X_TD, TOKENS)).softmax(1)
        aux = balance_loss(probs_TE, summed(counts_of(probs_TE), *AXES), NUM_TOKENS)
        aux.backward()
        reduce_gradients(gate)
        return {"aux": aux, "gate.grad": gate.w_DE.grad}


@bug(
    "B27",
    "Megatron-LM #5047",
    "C4",
    "an auxiliary loss is scaled by the count of this rank's tokens",
    mesh={"dp": 2, "tp": 2},
    refused=Refused(TYPES, "dp", "aux", "the product of two sums"),
    results={"loss": {"dp": I, "tp": I}, "gate.grad": WHOLE},
)
class ScaledByLocalCount:
    @staticmethod
    def one_device() -> Results:
        gate = Gate()
        logits_TE = gate(X_TD)
        probs_TE = logits_TE.softmax(1)
        loss = cross_entropy(logits_TE, LABELS_T)
        loss = loss + balance_loss(probs_TE, counts_of(probs_TE), NUM_TOKENS)
        loss.backward()
        return {"loss": loss, "gate.grad": gate.w_DE.grad}

    @staticmethod
    def wrong() -> None:
        gate = Gate()
        labels_T = mine(LABELS_T, TOKENS)
        logits_TE = gate(mine(X_TD, TOKENS))
        probs_TE = logits_TE.softmax(1)
        aux = balance_loss(probs_TE, summed(counts_of(probs_TE), *AXES), NUM_TOKENS)
        num_tokens = (labels_T >= 0).sum()
        # multiplied here, since everything is divided by the count at the end
        total = cross_entropy(logits_TE, labels_T, reduction="sum") + aux * num_tokens
        global_mean(total, num_tokens, AXES).backward()
        reduce_gradients(gate)

    @staticmethod
    def right() -> Results:
        gate = Gate()
        labels_T = mine(LABELS_T, TOKENS)
        logits_TE = gate(mine(X_TD, TOKENS))
        probs_TE = logits_TE.softmax(1)
        aux = balance_loss(probs_TE, summed(counts_of(probs_TE), *AXES), NUM_TOKENS)
        num_tokens = summed((labels_T >= 0).sum(), *AXES)
        total = cross_entropy(logits_TE, labels_T, reduction="sum") + aux * num_tokens
        loss = global_mean(total, num_tokens, AXES, count_src=R)
        loss.backward()
        reduce_gradients(gate)
        return {"loss": loss, "gate.grad": gate.w_DE.grad}


class SumOverTp(torch.autograd.Function):
    """A reduction written by hand: as fast as it gets, and in place."""

    @staticmethod
    def forward(ctx: Any, counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=device_mesh().get_group("tp"))
        return counts.view_as(counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]

    @staticmethod
    def placement_rule(counts: Any) -> Any:
        return {**counts, "tp": R}


@bug(
    "B28",
    "Megatron-LM #7452, #7481",
    "C4",
    "a reduction in place turns the count of this rank into the global one",
    mesh={"dp": 2, "tp": 2},
    refused=Refused(TYPES, None, "local_E", "other names for the same memory"),
    results={"aux": {"dp": P, "tp": P}, "gate.grad": WHOLE},
)
class OverwrittenCount:
    @staticmethod
    def one_device() -> Results:
        gate = Gate()
        probs_TE = gate(X_TD).softmax(1)
        counts_E = counts_of(probs_TE)
        aux = balance_loss(probs_TE, counts_E, NUM_TOKENS) * counts_E.sum() / TOP_K
        aux.backward()
        return {"aux": aux, "gate.grad": gate.w_DE.grad}

    @staticmethod
    def wrong() -> Results:
        gate = Gate()
        probs_TE = gate(mine(X_TD, TOKENS)).softmax(1)
        local_E = summed(counts_of(probs_TE), "dp")
        counts_E: Tensor = cast(Any, SumOverTp).apply(local_E)
        # meant to be this rank's tokens, and to be summed over tp with the rest
        num_tokens = all_reduce(local_E.sum() / TOP_K, "tp", src=P, dst=R)
        aux = balance_loss(probs_TE, counts_E, NUM_TOKENS) * num_tokens
        aux.backward()
        reduce_gradients(gate)
        return {"aux": aux, "gate.grad": gate.w_DE.grad}

    @staticmethod
    def right() -> Results:
        gate = Gate()
        probs_TE = gate(mine(X_TD, TOKENS)).softmax(1)
        local_E = summed(counts_of(probs_TE), "dp")
        counts_E = all_reduce(local_E, "tp", src=P, dst=R)
        num_tokens = all_reduce(local_E.sum() / TOP_K, "tp", src=P, dst=R)
        aux = balance_loss(probs_TE, counts_E, NUM_TOKENS) * num_tokens
        aux.backward()
        reduce_gradients(gate)
        return {"aux": aux, "gate.grad": gate.w_DE.grad}


STEP = 0.5


@bug(
    "B31",
    "torchtitan #4154",
    "C4",
    "counts are summed over dp, not over tp; the expert bias drifts apart",
    mesh={"dp": 2, "tp": 2},
    refused=Refused(TYPES, "tp", "excess_E", "a non-linear function of a sum"),
    results={"bias_E": WHOLE, "next_TK": TOKENS},
)
class BiasDrifts:
    @staticmethod
    def one_device() -> Results:
        scores_TE = Gate()(X_TD)
        counts_E = counts_of(scores_TE)
        bias_E = STEP * (counts_E.mean() - counts_E).sign()
        return {"bias_E": bias_E, "next_TK": (scores_TE + bias_E).topk(TOP_K).indices}

    @staticmethod
    def wrong() -> None:
        scores_TE = Gate()(mine(X_TD, TOKENS))
        bias_E = mine(torch.zeros(NUM_EXPERTS).double(), WHOLE)
        counts_E = summed(counts_of(scores_TE), "dp")
        excess_E = counts_E.mean() - counts_E
        signs_E = excess_E.sign()
        bias_E.add_(STEP * signs_E)

    @staticmethod
    def right() -> Results:
        scores_TE = Gate()(mine(X_TD, TOKENS))
        bias_E = mine(torch.zeros(NUM_EXPERTS).double(), WHOLE)
        counts_E = summed(counts_of(scores_TE), *AXES)
        excess_E = counts_E.mean() - counts_E
        signs_E = excess_E.sign()
        bias_E.add_(STEP * signs_E)
        return {"bias_E": bias_E, "next_TK": (scores_TE + bias_E).topk(TOP_K).indices}


BUGS = (AveragedShares, ScaledByLocalCount, OverwrittenCount, BiasDrifts)
