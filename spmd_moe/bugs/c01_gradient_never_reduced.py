"""C1: a replicated value is used differently on each rank, and nobody sums its gradient."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

from placements import I, P, R, S, all_reduce, convert
from spmd_moe.bugs.inputs import mine, numbers
from spmd_moe.bugs.record import TYPES, Refused, Results, bug

X_TD, GATE_D1, W_DF = numbers(3, 4), numbers(4, 1, seed=1), numbers(4, 6, seed=2)


@bug(
    "B01",
    "torchtitan #2387, #2416",
    "C1",
    "router scores meet experts cut over tp; the gradient counts as complete",
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


BUGS = (RouterScores,)
