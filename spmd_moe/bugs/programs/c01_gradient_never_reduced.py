"""C1: a replicated value is used differently on each rank, and nobody sums its gradient.

The bugs inside a layer; those of wrappers around it are in `c01_wrappers`.
"""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

import torch
from torch.nn.functional import silu

from placements import I, P, R, S, V, all_reduce, axis_rank, convert, reinterpret
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

X_TD, GATE_D1, W_DF = numbers(3, 4), numbers(4, 1, seed=1), numbers(4, 6, seed=2)


@bug(
    "B01",
    "torchtitan #2387, #2416",
    "C1",
    "router scores meet cut experts; their gradient counts as complete",
    mesh={"tp": 2},
    refused=Refused(TYPES, "tp", "scores_T1", "Invariant"),
    results={"y_TF": {"tp": S(1)}, "gate.grad": {"tp": I}},
)
class RouterScores:
    @staticmethod
    def one_device() -> Results:
        gate_D1 = GATE_D1.clone().requires_grad_()
        y_TF = (X_TD @ W_DF) * (X_TD @ gate_D1)
        y_TF.sum().backward()
        return {"y_TF": y_TF.detach(), "gate.grad": gate_D1.grad}

    @staticmethod
    def wrong() -> None:
        x_TD = mine(X_TD, {"tp": I})
        gate_D1 = mine(GATE_D1, {"tp": I}, grad=True)
        w_DF = mine(W_DF, {"tp": S(1)})
        scores_T1 = x_TD @ gate_D1
        experts_TF = convert(x_TD, "tp", src=I, dst=R) @ w_DF
        y_TF = experts_TF * scores_T1
        all_reduce(y_TF.sum(), "tp", src=P, dst=I).backward()

    @staticmethod
    def right() -> Results:
        x_TD = mine(X_TD, {"tp": I})
        gate_D1 = mine(GATE_D1, {"tp": I}, grad=True)
        w_DF = mine(W_DF, {"tp": S(1)})
        scores_T1 = convert(x_TD @ gate_D1, "tp", src=I, dst=R)
        experts_TF = convert(x_TD, "tp", src=I, dst=R) @ w_DF
        y_TF = experts_TF * scores_T1
        all_reduce(y_TF.sum(), "tp", src=P, dst=I).backward()
        return {"y_TF": y_TF, "gate.grad": gate_D1.grad}


# Three experts with two slots each; the hidden dim F is cut over tp.
ROWS_ECD = numbers(3, 2, 4, seed=3)
W1_EDF, W2_EFD = numbers(3, 4, 6, seed=4), numbers(3, 6, 4, seed=5)


@bug(
    "B02",
    "torchtitan #1805, #1878",
    "C1",
    "rows enter experts cut over tp; their gradient is one rank's share",
    mesh={"tp": 3},
    refused=Refused(TYPES, "tp", "rows_ECD", "Invariant"),
    results={"y_ECD": {"tp": I}, "rows.grad": {"tp": I}, "w1.grad": {"tp": S(2)}},
)
class ExpertInput:
    @staticmethod
    def one_device() -> Results:
        rows_ECD = ROWS_ECD.clone().requires_grad_()
        w1_EDF = W1_EDF.clone().requires_grad_()
        y_ECD = torch.bmm(silu(torch.bmm(rows_ECD, w1_EDF)), W2_EFD)
        y_ECD.square().sum().backward()
        return {"y_ECD": y_ECD, "rows.grad": rows_ECD.grad, "w1.grad": w1_EDF.grad}

    @staticmethod
    def wrong() -> None:
        rows_ECD = mine(ROWS_ECD, {"tp": I}, grad=True)
        w1_EDF = mine(W1_EDF, {"tp": S(2)}, grad=True)
        w2_EFD = mine(W2_EFD, {"tp": S(1)})
        hidden_ECF = silu(torch.bmm(rows_ECD, w1_EDF))
        y_ECD = all_reduce(torch.bmm(hidden_ECF, w2_EFD), "tp", src=P, dst=I)
        y_ECD.square().sum().backward()

    @staticmethod
    def right() -> Results:
        rows_ECD = mine(ROWS_ECD, {"tp": I}, grad=True)
        w1_EDF = mine(W1_EDF, {"tp": S(2)}, grad=True)
        w2_EFD = mine(W2_EFD, {"tp": S(1)})
        used_ECD = convert(rows_ECD, "tp", src=I, dst=R)
        hidden_ECF = silu(torch.bmm(used_ECD, w1_EDF))
        y_ECD = all_reduce(torch.bmm(hidden_ECF, w2_EFD), "tp", src=P, dst=I)
        y_ECD.square().sum().backward()
        return {"y_ECD": y_ECD, "rows.grad": rows_ECD.grad, "w1.grad": w1_EDF.grad}


# Six experts, three on each ep rank; every ep rank holds all tokens.
ROUTER_DE, EXPERT_EDF = numbers(4, 6, seed=6), numbers(6, 4, 2, seed=7)


@bug(
    "B07",
    "transformers #48205",
    "C1",
    "each ep rank masks scores of its own; nobody sums their gradient",
    mesh={"ep": 2},
    refused=Refused(TYPES, "ep", "scores_TE", "Invariant"),
    results={"y_TF": {"ep": I}, "router.grad": {"ep": I}},
)
class MaskedScores:
    @staticmethod
    def one_device() -> Results:
        router_DE = ROUTER_DE.clone().requires_grad_()
        y_TF = torch.einsum("te,td,edf->tf", X_TD @ router_DE, X_TD, EXPERT_EDF)
        y_TF.square().sum().backward()
        return {"y_TF": y_TF, "router.grad": router_DE.grad}

    @staticmethod
    def wrong() -> None:
        x_TD = mine(X_TD, {"ep": I})
        router_DE = mine(ROUTER_DE, {"ep": I}, grad=True)
        w_GDF = reinterpret(mine(EXPERT_EDF, {"ep": S(0)}), "ep", src=S(0), dst=V)
        first = axis_rank("ep") * 3
        not_mine_E = torch.arange(6) // 3 != axis_rank("ep")
        scores_TE = x_TD @ router_DE
        scores_TG = scores_TE.masked_fill(not_mine_E, 0)[:, first : first + 3]
        used_TD = convert(x_TD, "ep", src=I, dst=R)
        y_TF = torch.einsum("tg,td,gdf->tf", scores_TG, used_TD, w_GDF)
        y_TF = all_reduce(reinterpret(y_TF, "ep", src=V, dst=P), "ep", src=P, dst=I)
        y_TF.square().sum().backward()

    @staticmethod
    def right() -> Results:
        x_TD = mine(X_TD, {"ep": I})
        router_DE = mine(ROUTER_DE, {"ep": I}, grad=True)
        w_GDF = reinterpret(mine(EXPERT_EDF, {"ep": S(0)}), "ep", src=S(0), dst=V)
        first = axis_rank("ep") * 3
        not_mine_E = torch.arange(6) // 3 != axis_rank("ep")
        scores_TE = convert(x_TD @ router_DE, "ep", src=I, dst=R)
        scores_TG = scores_TE.masked_fill(not_mine_E, 0)[:, first : first + 3]
        used_TD = convert(x_TD, "ep", src=I, dst=R)
        y_TF = torch.einsum("tg,td,gdf->tf", scores_TG, used_TD, w_GDF)
        y_TF = all_reduce(reinterpret(y_TF, "ep", src=V, dst=P), "ep", src=P, dst=I)
        y_TF.square().sum().backward()
        return {"y_TF": y_TF, "router.grad": router_DE.grad}


BUGS = (RouterScores, ExpertInput, MaskedScores)
