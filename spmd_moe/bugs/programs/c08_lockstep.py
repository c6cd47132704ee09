"""C8: an expert without tokens: one rank leaves the step that all ranks must make."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placements import I, P, S, V, all_reduce, all_to_all, declare, reinterpret
from spmd_moe.bugs.record import KIT, VERIFY, Refused, Results, bug, mine, numbers

# Two tokens on each of three ranks; all of them go to the experts of ranks 0 and 1.
X_TD, W_EDD = numbers(6, 3), numbers(3, 3, 3, seed=1)
SENT = ([1, 1, 0], [2, 0, 0], [0, 2, 0])  # tokens from each rank to each rank, in order


def moe_step(x_TD: Tensor, expert: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Send the tokens to their experts' ranks, run the experts, send them back; add."""
    rank = dist.get_rank()
    sent, received = SENT[rank], [row[rank] for row in SENT]
    rows_TD = reinterpret(x_TD, "ep", src=S(0), dst=V)
    rows_MD = all_to_all(rows_TD, "ep", input_split_sizes=sent, output_split_sizes=received)
    rows_MD = expert(rows_MD, rows_TD)
    y_TD = all_to_all(rows_MD, "ep", input_split_sizes=received, output_split_sizes=sent)
    return x_TD + reinterpret(y_TD, "ep", src=V, dst=S(0))


def one_device_step() -> Results:
    x_TD, w_EDD = X_TD.clone().requires_grad_(), W_EDD.clone().requires_grad_()
    owner_T = [rank for row in SENT for rank, n in enumerate(row) for _ in range(n)]
    y_TD = x_TD + torch.stack([x_TD[t] @ w_EDD[e] for t, e in enumerate(owner_T)])
    y_TD.sum().backward()
    return {"y_TD": y_TD.detach(), "x.grad": x_TD.grad, "w.grad": w_EDD.grad}


def run_step(expert: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Results:
    x_TD = mine(X_TD, {"ep": S(0)}, grad=True)
    w_GDD = mine(W_EDD, {"ep": S(0)}, grad=True)
    w_DD = reinterpret(w_GDD, "ep", src=S(0), dst=V)[0]
    y_TD = moe_step(x_TD, lambda rows_MD, rows_TD: expert(rows_MD, rows_TD, w_DD))
    all_reduce(y_TD.sum(), "ep", src=P, dst=I).backward()
    return {"y_TD": y_TD, "x.grad": x_TD.grad, "w.grad": w_GDD.grad}


STEP = {"y_TD": {"ep": S(0)}, "x.grad": {"ep": S(0)}, "w.grad": {"ep": S(0)}}


@bug(
    "B53",
    "NeMo Automodel #3680",
    "C8",
    "a rank without tokens builds its result from the rows before dispatch",
    mesh={"ep": 3},
    refused=Refused(KIT, None, "rank 2  returned", "rank 0  all_to_all_single"),
    results=STEP,
)
class BypassedDispatch:
    one_device = staticmethod(one_device_step)

    @staticmethod
    def wrong() -> None:
        def expert(rows_MD: Tensor, rows_TD: Tensor, w_DD: Tensor) -> Tensor:
            if rows_MD.shape[0] == 0:
                return rows_TD[:0] * 0 + 0 * w_DD.sum()
            return rows_MD @ w_DD

        run_step(expert)

    @staticmethod
    def right() -> Results:
        def expert(rows_MD: Tensor, rows_TD: Tensor, w_DD: Tensor) -> Tensor:
            if rows_MD.shape[0] == 0:
                return rows_MD * 0 + 0 * w_DD.sum()
            return rows_MD @ w_DD

        return run_step(expert)


@bug(
    "B55",
    "Megatron-LM #4851, #3626",
    "C8",
    "without tokens a rank skips its experts and returns a fresh tensor",
    mesh={"ep": 3},
    refused=Refused(KIT, None, "rank 2  returned", "rank 0  all_to_all_single"),
    results=STEP,
)
class SkippedExperts:
    one_device = staticmethod(one_device_step)

    @staticmethod
    def wrong() -> None:
        def expert(rows_MD: Tensor, rows_TD: Tensor, w_DD: Tensor) -> Tensor:
            if rows_MD.shape[0] == 0:
                return torch.zeros_like(rows_MD)
            return rows_MD @ w_DD

        run_step(expert)

    @staticmethod
    def right() -> Results:
        def expert(rows_MD: Tensor, rows_TD: Tensor, w_DD: Tensor) -> Tensor:
            return rows_MD @ w_DD  # a product of no rows is a node of the graph too

        return run_step(expert)


class Experts(nn.Module):
    """Two experts of this rank: the first takes one token, the second the others."""

    def __init__(self, w_DD: Tensor) -> None:
        super().__init__()
        self.w0_DD, self.w1_DD = nn.Parameter(w_DD), nn.Parameter(w_DD + 1)
        declare(self, {"w0_DD": {"ep": V}, "w1_DD": {"ep": V}})

    def forward(self, rows_MD: Tensor) -> Tensor:
        return torch.cat([rows_MD[:1] @ self.w0_DD, rows_MD[1:] @ self.w1_DD])


class Dummy(Experts):
    """As `Experts`, but on a rank without tokens no product is made."""

    def forward(self, rows_MD: Tensor) -> Tensor:
        if rows_MD.shape[0] == 0:
            return rows_MD * 0 + 0 * self.w0_DD.sum()
        return super().forward(rows_MD)


def run_module(kind: type[Experts]) -> Results:
    experts = kind(mine(W_EDD, {"ep": V}))
    x_TD = mine(X_TD, {"ep": S(0)}, grad=True)
    y_TD = moe_step(x_TD, lambda rows_MD, _: experts(rows_MD))
    all_reduce(y_TD.sum(), "ep", src=P, dst=I).backward()
    w0, w1 = experts.w0_DD.grad, experts.w1_DD.grad
    return {"y_TD": y_TD, "x.grad": x_TD.grad, "w0.grad": w0, "w1.grad": w1}


@bug(
    "B56",
    "NeMo Automodel #2995",
    "C8",
    "without tokens only the first of a rank's experts gets a gradient",
    mesh={"ep": 3},
    refused=Refused(VERIFY, None, "w1_DD", "without a gradient"),
    results={
        "y_TD": {"ep": S(0)},
        "x.grad": {"ep": S(0)},
        "w0.grad": {"ep": V},
        "w1.grad": {"ep": V},
    },
)
class OneDummy:
    @staticmethod
    def one_device() -> Results:
        x_TD = X_TD.clone().requires_grad_()
        every = [Experts(w_DD.clone()) for w_DD in W_EDD]
        rows = [x_TD[[0, 2, 3]], x_TD[[1, 4, 5]], x_TD[:0]]
        y = [experts.forward(r) for experts, r in zip(every, rows, strict=True)]
        y_TD = x_TD + torch.cat(y)[[0, 3, 1, 2, 4, 5]]
        y_TD.sum().backward()
        w0 = torch.stack([e.w0_DD.grad for e in every if e.w0_DD.grad is not None])
        w1 = torch.stack([e.w1_DD.grad for e in every if e.w1_DD.grad is not None])
        grads = {"x.grad": x_TD.grad, "w0.grad": w0, "w1.grad": w1}
        return {"y_TD": y_TD.detach(), **grads}

    @staticmethod
    def wrong() -> None:
        run_module(Dummy)

    @staticmethod
    def right() -> Results:
        return run_module(Experts)


BUGS = (BypassedDispatch, SkippedExperts, OneDummy)
