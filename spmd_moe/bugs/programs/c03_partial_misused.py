"""C3: one rank's summand is taken for the sum, or something is added to every summand."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from placements import I, P, R, S, V, all_gather, all_reduce, convert, reinterpret
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

X_TD, W1_DF, W2_FD = numbers(5, 4), numbers(4, 8, seed=1), numbers(8, 4, seed=2)
SHARED_DD = numbers(4, 4, seed=3)


@bug(
    "B17",
    "TensorRT-LLM #15922",
    "C3",
    "the whole shared output is added before the routed one is summed",
    mesh={"tp": 4},
    refused=Refused(TYPES, "tp", "routed_TD", "counted once per rank"),
    results={"y_TD": {"tp": I}, "x.grad": {"tp": I}, "shared.grad": {"tp": P}},
)
class SharedBeforeSum:
    @staticmethod
    def one_device() -> Results:
        x_TD = X_TD.clone().requires_grad_()
        shared_DD = SHARED_DD.clone().requires_grad_()
        y_TD = silu(x_TD @ W1_DF) @ W2_FD + x_TD @ shared_DD
        y_TD.square().sum().backward()
        return {"y_TD": y_TD, "x.grad": x_TD.grad, "shared.grad": shared_DD.grad}

    @staticmethod
    def wrong() -> None:
        x_TD = mine(X_TD, {"tp": I}, grad=True)
        w1_DF, w2_FD = mine(W1_DF, {"tp": S(1)}), mine(W2_FD, {"tp": S(0)})
        shared_DD = mine(SHARED_DD, {"tp": R}, grad=True)
        used_TD = convert(x_TD, "tp", src=I, dst=R)
        routed_TD = silu(used_TD @ w1_DF) @ w2_FD
        shared_TD = used_TD @ shared_DD
        both_TD = routed_TD + shared_TD
        y_TD = all_reduce(both_TD, "tp", src=P, dst=I)
        y_TD.square().sum().backward()

    @staticmethod
    def right() -> Results:
        x_TD = mine(X_TD, {"tp": I}, grad=True)
        w1_DF, w2_FD = mine(W1_DF, {"tp": S(1)}), mine(W2_FD, {"tp": S(0)})
        shared_DD = mine(SHARED_DD, {"tp": R}, grad=True)
        used_TD = convert(x_TD, "tp", src=I, dst=R)
        routed_TD = silu(used_TD @ w1_DF) @ w2_FD
        shared_TD = used_TD @ shared_DD
        y_TD = all_reduce(routed_TD, "tp", src=P, dst=R) + shared_TD
        y_TD = convert(y_TD, "tp", src=R, dst=I)
        y_TD.square().sum().backward()
        return {"y_TD": y_TD, "x.grad": x_TD.grad, "shared.grad": shared_DD.grad}


# Two experts with three slots each, cut over tp along F.
HIDDEN_ECF, W2_EFD = numbers(2, 3, 6, seed=4), numbers(2, 6, 4, seed=5)
BIAS_ED = numbers(2, 4, seed=6)


def degree_of(parameter: Tensor) -> int:
    """Over how many ranks a parameter is spread, if it is a DTensor."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    return 1 if mesh is None else mesh.size()


@bug(
    "B19",
    "torchtitan #4245",
    "C3",
    "an expert bias is added on each tp rank, its divisor read as 1",
    mesh={"tp": 3},
    refused=Refused(TYPES, "tp", "rows_ECD", "counted once per rank"),
    results={"y_ECD": {"tp": I}, "bias.grad": {"tp": P}, "w2.grad": {"tp": S(1)}},
)
class BiasOnEveryRank:
    @staticmethod
    def one_device() -> Results:
        w2_EFD = W2_EFD.clone().requires_grad_()
        bias_ED = BIAS_ED.clone().requires_grad_()
        y_ECD = torch.bmm(HIDDEN_ECF, w2_EFD) + bias_ED.unsqueeze(1)
        y_ECD.square().sum().backward()
        return {"y_ECD": y_ECD, "bias.grad": bias_ED.grad, "w2.grad": w2_EFD.grad}

    @staticmethod
    def wrong() -> None:
        hidden_ECF = mine(HIDDEN_ECF, {"tp": S(2)})
        w2_EFD = mine(W2_EFD, {"tp": S(1)}, grad=True)
        bias_ED = mine(BIAS_ED, {"tp": R}, grad=True)
        rows_ECD = torch.bmm(hidden_ECF, w2_EFD)
        rows_ECD = rows_ECD + bias_ED.unsqueeze(1) / degree_of(bias_ED)
        all_reduce(rows_ECD, "tp", src=P, dst=I).square().sum().backward()

    @staticmethod
    def right() -> Results:
        hidden_ECF = mine(HIDDEN_ECF, {"tp": S(2)})
        w2_EFD = mine(W2_EFD, {"tp": S(1)}, grad=True)
        bias_ED = mine(BIAS_ED, {"tp": R}, grad=True)
        rows_ECD = torch.bmm(hidden_ECF, w2_EFD)
        rows_ECD = rows_ECD + convert(bias_ED, "tp", src=R, dst=P).unsqueeze(1)
        y_ECD = all_reduce(rows_ECD, "tp", src=P, dst=I)
        y_ECD.square().sum().backward()
        return {"y_ECD": y_ECD, "bias.grad": bias_ED.grad, "w2.grad": w2_EFD.grad}


# Attention runs data-parallel: each dp rank has the tokens of its own sequences.
BATCH_BLD = numbers(4, 3, 4, seed=7)
BATCH = {"dp": S(0), "tp": R}


def gated(x_BLD: Tensor, w1_DF: Tensor, w2_FD: Tensor, *, reduce: bool) -> Tensor:
    """An expert cut over tp along F; the caller may want to sum later."""
    y_BLD = silu(x_BLD @ w1_DF) @ w2_FD
    return all_reduce(y_BLD, "tp", src=P, dst=R) if reduce else y_BLD


@bug(
    "B20",
    "tpu-inference #3435",
    "C3",
    "the shared experts are left unsummed, the routed ones are not",
    mesh={"dp": 2, "tp": 2},
    refused=Refused(TYPES, "tp", "shared_BLD", "counted once per rank"),
    results={"y_BLD": BATCH, "x.grad": {"dp": S(0), "tp": P}},
)
class SharedLeftPartial:
    @staticmethod
    def one_device() -> Results:
        x_BLD = BATCH_BLD.clone().requires_grad_()
        y_BLD = 2 * silu(x_BLD @ W1_DF) @ W2_FD
        y_BLD.square().sum().backward()
        return {"y_BLD": y_BLD, "x.grad": x_BLD.grad}

    @staticmethod
    def wrong() -> None:
        x_BLD = mine(BATCH_BLD, BATCH, grad=True)
        w1_DF = mine(W1_DF, {"dp": R, "tp": S(1)})
        w2_FD = mine(W2_FD, {"dp": R, "tp": S(0)})
        routed_BLD = gated(x_BLD, w1_DF, w2_FD, reduce=True)
        shared_BLD = gated(x_BLD, w1_DF, w2_FD, reduce=False)
        y_BLD = shared_BLD + routed_BLD
        y_BLD.square().sum().backward()

    @staticmethod
    def right() -> Results:
        x_BLD = mine(BATCH_BLD, BATCH, grad=True)
        w1_DF = mine(W1_DF, {"dp": R, "tp": S(1)})
        w2_FD = mine(W2_FD, {"dp": R, "tp": S(0)})
        routed_BLD = gated(x_BLD, w1_DF, w2_FD, reduce=True)
        shared_BLD = gated(x_BLD, w1_DF, w2_FD, reduce=True)
        y_BLD = shared_BLD + routed_BLD
        convert(y_BLD, "tp", src=R, dst=I).square().sum().backward()
        return {"y_BLD": y_BLD, "x.grad": x_BLD.grad}


VALUES_N = numbers(9, seed=8)


@bug(
    "B22",
    "pytorch #163193, #149768, #170030",
    "C3",
    "a constant is added to each rank's share of a sum",
    mesh={"dp": 3},
    refused=Refused(TYPES, "dp", "total", "a constant added to every summand"),
    results={"shifted": {"dp": I}, "values.grad": {"dp": S(0)}},
)
class ConstantAdded:
    @staticmethod
    def one_device() -> Results:
        values_N = VALUES_N.clone().requires_grad_()
        shifted = values_N.sum() + 10
        shifted.square().backward()
        return {"shifted": shifted, "values.grad": values_N.grad}

    @staticmethod
    def wrong() -> None:
        values_N = mine(VALUES_N, {"dp": S(0)}, grad=True)
        total = values_N.sum()
        shifted = total + 10
        shifted = all_reduce(shifted, "dp", src=P, dst=I)
        shifted.square().backward()

    @staticmethod
    def right() -> Results:
        values_N = mine(VALUES_N, {"dp": S(0)}, grad=True)
        total = values_N.sum()
        shifted = all_reduce(total, "dp", src=P, dst=I) + 10
        shifted.square().backward()
        return {"shifted": shifted, "values.grad": values_N.grad}


# Logits over a vocabulary of nine, three on each rank.
LOGITS_TV, TARGET_TV = numbers(4, 9, seed=9), numbers(4, 9, seed=10)


@bug(
    "B24",
    "tt-xla #6075",
    "C3",
    "the maxima of the pieces of a cut softmax are combined by a sum",
    mesh={"tp": 3},
    refused=Refused(TYPES, "tp", "held_TV", "Partial means sum"),
    results={"probs_TV": {"tp": S(1)}, "logits.grad": {"tp": S(1)}},
)
class SummedMaxima:
    @staticmethod
    def one_device() -> Results:
        logits_TV = LOGITS_TV.clone().requires_grad_()
        probs_TV = logits_TV.softmax(1)
        (probs_TV * TARGET_TV).sum().backward()
        return {"probs_TV": probs_TV, "logits.grad": logits_TV.grad}

    @staticmethod
    def wrong() -> None:
        logits_TV = mine(LOGITS_TV, {"tp": S(1)}, grad=True)
        held_TV = logits_TV.detach()
        peak_T1 = held_TV.amax(1, True)
        peak_T1 = all_reduce(peak_T1, "tp", src=P, dst=R)
        exp_TV = (logits_TV - peak_T1).exp()
        total_T1 = all_reduce(exp_TV.sum(1, keepdim=True), "tp", src=P, dst=R)
        probs_TV = exp_TV / total_T1
        (probs_TV * mine(TARGET_TV, {"tp": S(1)})).sum().backward()

    @staticmethod
    def right() -> Results:
        logits_TV = mine(LOGITS_TV, {"tp": S(1)}, grad=True)
        own_TV = reinterpret(logits_TV.detach(), "tp", src=S(1), dst=V)
        peak_T1 = all_gather(own_TV.amax(1, True), "tp", src=V, dst=R).amax(0)
        exp_TV = (logits_TV - peak_T1).exp()
        total_T1 = all_reduce(exp_TV.sum(1, keepdim=True), "tp", src=P, dst=R)
        probs_TV = exp_TV / total_T1
        (probs_TV * mine(TARGET_TV, {"tp": S(1)})).sum().backward()
        return {"probs_TV": probs_TV, "logits.grad": logits_TV.grad}


BUGS = (SharedBeforeSum, BiasOnEveryRank, SharedLeftPartial, ConstantAdded, SummedMaxima)
