"""C3 for the peers: one rank's summand is taken for the sum.

`spmd_types` in local mode gives a contraction of cut dims the type Varying; the programs
do not declare it Partial by hand, unless the report starts from a Partial value (B22).
"""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate
from torch.nn.functional import silu

from placements import I, P, R, S, all_gather, all_reduce, convert
from spmd_moe.bugs.peers.words import from_local, locally, placed
from spmd_moe.bugs.programs.c03_partial_misused import (
    BATCH_BLD,
    BIAS_ED,
    HIDDEN_ECF,
    LOGITS_TV,
    SHARED_DD,
    TARGET_TV,
    W1_DF,
    W2_EFD,
    W2_FD,
    X_TD,
)
from spmd_moe.bugs.record import Results, mine


class B17:
    @staticmethod
    def wrong_for_peers() -> Results:
        x_TD = mine(X_TD, {"tp": I}, grad=True)
        w1_DF, w2_FD = mine(W1_DF, {"tp": S(1)}), mine(W2_FD, {"tp": S(0)})
        used_TD = convert(x_TD, "tp", src=I, dst=R)
        routed_TD = silu(used_TD @ w1_DF) @ w2_FD
        shared_TD = used_TD @ mine(SHARED_DD, {"tp": R})
        y_TD = all_reduce(routed_TD + shared_TD, "tp", src=P, dst=I)
        y_TD.square().sum().backward()
        return {"y_TD": y_TD, "x.grad": x_TD.grad}

    @staticmethod
    def right_for_peers() -> Results:
        x_TD = mine(X_TD, {"tp": I}, grad=True)
        w1_DF, w2_FD = mine(W1_DF, {"tp": S(1)}), mine(W2_FD, {"tp": S(0)})
        used_TD = convert(x_TD, "tp", src=I, dst=R)
        routed_TD = silu(used_TD @ w1_DF) @ w2_FD
        shared_TD = x_TD @ mine(SHARED_DD, {"tp": I})
        y_TD = all_reduce(routed_TD, "tp", src=P, dst=I) + shared_TD
        y_TD.square().sum().backward()
        return {"y_TD": y_TD, "x.grad": x_TD.grad}


class B19:
    @staticmethod
    def wrong_for_peers() -> Results:
        hidden_ECF, w2_EFD = mine(HIDDEN_ECF, {"tp": S(2)}), mine(W2_EFD, {"tp": S(1)})
        bias_ED = mine(BIAS_ED, {"tp": R}, grad=True)
        degree = 1  # read from a mesh that the parameter does not have
        rows_ECD = torch.bmm(hidden_ECF, w2_EFD) + bias_ED.unsqueeze(1) / degree
        y_ECD = all_reduce(rows_ECD, "tp", src=P, dst=I)
        y_ECD.square().sum().backward()
        return {"y_ECD": y_ECD}

    @staticmethod
    def right_for_peers() -> Results:
        hidden_ECF, w2_EFD = mine(HIDDEN_ECF, {"tp": S(2)}), mine(W2_EFD, {"tp": S(1)})
        bias_ED = mine(BIAS_ED, {"tp": R}, grad=True)
        rows_ECD = torch.bmm(hidden_ECF, w2_EFD)
        rows_ECD = rows_ECD + convert(bias_ED, "tp", src=R, dst=P).unsqueeze(1)
        y_ECD = all_reduce(rows_ECD, "tp", src=P, dst=I)
        y_ECD.square().sum().backward()
        return {"y_ECD": y_ECD}

    # Without strictness DTensor reduces before it adds; so does the right program.
    @staticmethod
    def wrong_for_dtensor() -> Results:
        hidden_ECF, w2_EFD = placed(HIDDEN_ECF, {"tp": S(2)}), placed(W2_EFD, {"tp": S(1)})
        bias_ED = placed(BIAS_ED, {"tp": R}, grad=True)
        y_ECD = torch.bmm(hidden_ECF, w2_EFD) + bias_ED.unsqueeze(1)
        y_ECD.square().sum().backward()
        return {"y_ECD": y_ECD}

    @staticmethod
    def right_for_dtensor() -> Results:
        hidden_ECF, w2_EFD = placed(HIDDEN_ECF, {"tp": S(2)}), placed(W2_EFD, {"tp": S(1)})
        bias_ED = placed(BIAS_ED, {"tp": R}, grad=True)
        rows_ECD: Any = torch.bmm(hidden_ECF, w2_EFD)
        y_ECD = rows_ECD.redistribute(placements=[Replicate()]) + bias_ED.unsqueeze(1)
        y_ECD.square().sum().backward()
        return {"y_ECD": y_ECD}


def gated(x_BLD: Tensor, w1_DF: Tensor, w2_FD: Tensor, *, reduce: bool) -> Tensor:
    y_BLD = silu(convert(x_BLD, "tp", src=I, dst=R) @ w1_DF) @ w2_FD
    return all_reduce(y_BLD, "tp", src=P, dst=I) if reduce else y_BLD


def both_experts(reduce_shared: bool) -> Results:
    x_BLD = mine(BATCH_BLD, {"dp": S(0), "tp": I}, grad=True)
    w1_DF = mine(W1_DF, {"dp": R, "tp": S(1)})
    w2_FD = mine(W2_FD, {"dp": R, "tp": S(0)})
    routed_BLD = gated(x_BLD, w1_DF, w2_FD, reduce=True)
    shared_BLD = gated(x_BLD, w1_DF, w2_FD, reduce=reduce_shared)
    y_BLD = shared_BLD + routed_BLD
    all_reduce(y_BLD.square().sum(), "dp", src=P, dst=I).backward()
    return {"y_BLD": y_BLD, "x.grad": x_BLD.grad}


class B20:
    @staticmethod
    def wrong_for_peers() -> Results:
        return both_experts(False)

    @staticmethod
    def right_for_peers() -> Results:
        return both_experts(True)


class B22:
    @staticmethod
    def wrong_for_peers() -> Results:
        total = mine(torch.tensor(9.0), {"dp": P}, grad=True)
        shifted = all_reduce(total + 10, "dp", src=P, dst=I)
        shifted.square().backward()
        return {"shifted": shifted}

    @staticmethod
    def right_for_peers() -> Results:
        total = mine(torch.tensor(9.0), {"dp": P}, grad=True)
        shifted = all_reduce(total, "dp", src=P, dst=I) + 10
        shifted.square().backward()
        return {"shifted": shifted}


def cut_softmax(logits_TV: Tensor, peak_T1: Tensor) -> Results:
    exp_TV = (logits_TV - peak_T1).exp()
    total_T1 = all_reduce(exp_TV.sum(1, keepdim=True), "tp", src=P, dst=R)
    probs_TV = exp_TV / total_T1
    loss = (probs_TV * mine(TARGET_TV, {"tp": S(1)})).sum()
    all_reduce(loss, "tp", src=P, dst=I).backward()
    return {"peak_T1": peak_T1, "probs_TV": probs_TV, "logits.grad": logits_TV.grad}


def combined_maxima(kind: Placement) -> Results:
    logits_TV = placed(LOGITS_TV, {"tp": S(1)}, grad=True)
    peak_T1 = from_local(logits_TV.detach().to_local().amax(1, True), kind)
    return cut_softmax(logits_TV, peak_T1.redistribute(placements=[Replicate()]))


class B24:
    # The shift of a softmax cancels in exact numbers, so it is a result here.
    @staticmethod
    def wrong_for_peers() -> Results:
        logits_TV = mine(LOGITS_TV, {"tp": S(1)}, grad=True)
        peak_T1 = locally(lambda: logits_TV.detach().amax(1, True), {"tp": P})
        return cut_softmax(logits_TV, all_reduce(peak_T1, "tp", src=P, dst=R))

    @staticmethod
    def right_for_peers() -> Results:
        logits_TV = mine(LOGITS_TV, {"tp": S(1)}, grad=True)
        peak_TW = locally(lambda: logits_TV.detach().amax(1, True), {"tp": S(1)})
        peak_TW = all_gather(peak_TW, "tp", src=S(1), dst=R)
        return cut_softmax(logits_TV, peak_TW.amax(1, True))

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return combined_maxima(Partial())

    @staticmethod
    def right_for_dtensor() -> Results:
        return combined_maxima(Partial("max"))
