"""C5: which token, which row, which expert: an index or a layout that means another one."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

import torch
import torch.distributed as dist

from placements import (
    Even,
    Folded,
    I,
    Index,
    P,
    Padded,
    R,
    S,
    V,
    ZigZag,
    all_gather,
    all_reduce,
    assert_type,
    reinterpret,
    to_global,
    to_local,
)
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine, numbers

X_BLD, W_TD = numbers(2, 5, 4), numbers(10, 4, seed=1)
TOKENS = Folded(2, Padded(5))  # two sequences of 5, each cut over tp into 3 and 2


@bug(
    "B35",
    "torchtitan #3604",
    "C5",
    "combine adds rank * tokens to a token's row, with two sequences",
    mesh={"tp": 2},
    refused=Refused(TYPES, None, "token_T", "arithmetic"),
    results={"y_TD": {"tp": I}, "x.grad": {"tp": S(1, Padded(5))}},
)
class CombineRows:
    @staticmethod
    def one_device() -> Results:
        x_BLD = X_BLD.clone().requires_grad_()
        y_TD = x_BLD.flatten(0, 1) ** 2
        (y_TD * W_TD).sum().backward()
        return {"y_TD": y_TD.detach(), "x.grad": x_BLD.grad}

    @staticmethod
    def wrong() -> None:
        x_BLD = mine(X_BLD, {"tp": S(1, Padded(5))}, grad=True)
        y_TD = x_BLD.flatten(0, 1) ** 2
        token_T = torch.arange(y_TD.shape[0]) + dist.get_rank() * y_TD.shape[0]
        full_TD = assert_type(torch.zeros(10, 4).double(), {"tp": P})
        full_TD = full_TD.index_add(0, token_T, y_TD)
        y_TD = all_reduce(full_TD, "tp", src=P, dst=I)
        (y_TD * mine(W_TD, {"tp": I})).sum().backward()

    @staticmethod
    def right() -> Results:
        x_BLD = mine(X_BLD, {"tp": S(1, Padded(5))}, grad=True)
        y_TD = x_BLD.flatten(0, 1) ** 2
        here_T = torch.arange(y_TD.shape[0])
        assert_type(here_T, {"tp": S(0, TOKENS)}, index=Index(TOKENS, "tp"))
        token_T = to_global(here_T, "tp", TOKENS)
        full_TD = assert_type(torch.zeros(10, 4).double(), {"tp": P})
        full_TD = full_TD.index_add(0, token_T, y_TD)
        y_TD = all_reduce(full_TD, "tp", src=P, dst=I)
        (y_TD * mine(W_TD, {"tp": I})).sum().backward()
        return {"y_TD": y_TD, "x.grad": x_BLD.grad}


X_484, W_16_8 = numbers(4, 8, 4), numbers(16, 8, seed=1)


@bug(
    "B36",
    "pytorch #179502, #179509",
    "C5",
    "a view of pieces of an inner dim is gathered as one run per rank",
    mesh={"tp": 2},
    refused=Refused(TYPES, "tp", "y_16_8", "which rows each rank holds"),
    results={"full_16_8": {"tp": I}, "x.grad": {"tp": S(1)}},
)
class ViewThenGather:
    @staticmethod
    def one_device() -> Results:
        x_484 = X_484.clone().requires_grad_()
        full_16_8 = x_484.view(16, 8)
        (full_16_8 * W_16_8).sum().backward()
        return {"full_16_8": full_16_8.detach(), "x.grad": x_484.grad}

    @staticmethod
    def wrong() -> None:
        x_484 = mine(X_484, {"tp": S(1)}, grad=True)
        y_16_8 = x_484.view(-1, 8)
        full_16_8 = all_gather(y_16_8, "tp", src=S(0), dst=I)
        (full_16_8 * mine(W_16_8, {"tp": I})).sum().backward()

    @staticmethod
    def right() -> Results:
        x_484 = mine(X_484, {"tp": S(1)}, grad=True)
        y_16_8 = x_484.view(-1, 8)
        full_16_8 = all_gather(y_16_8, "tp", src=S(0, Folded(4, Even(4))), dst=I)
        (full_16_8 * mine(W_16_8, {"tp": I})).sum().backward()
        return {"full_16_8": full_16_8, "x.grad": x_484.grad}


X_LD, W_LD = numbers(8, 3), numbers(8, 3, seed=1)
RUNS = Even(8)  # rank r holds one run of the sequence
ZIGZAG = ZigZag(8)  # rank r holds its run from the front and its run from the back


@bug(
    "B39",
    "slime #1871",
    "C5",
    "a gather undoes another cut of the sequence than the data has",
    mesh={"cp": 2},
    refused=Refused(TYPES, "cp", "x_LD", "src must be the type"),
    results={"y_LD": {"cp": I}, "x.grad": {"cp": S(0, RUNS)}},
)
class WrongLayout:
    @staticmethod
    def one_device() -> Results:
        x_LD = X_LD.clone().requires_grad_()
        y_LD = x_LD.cumsum(0)
        (y_LD * W_LD).sum().backward()
        return {"y_LD": y_LD.detach(), "x.grad": x_LD.grad}

    @staticmethod
    def wrong() -> None:
        x_LD = mine(X_LD, {"cp": S(0, RUNS)}, grad=True)
        full_LD = all_gather(x_LD, "cp", src=S(0, ZIGZAG), dst=I)
        y_LD = full_LD.cumsum(0)
        (y_LD * mine(W_LD, {"cp": I})).sum().backward()

    @staticmethod
    def right() -> Results:
        x_LD = mine(X_LD, {"cp": S(0, RUNS)}, grad=True)
        full_LD = all_gather(x_LD, "cp", src=S(0, RUNS), dst=I)
        y_LD = full_LD.cumsum(0)
        (y_LD * mine(W_LD, {"cp": I})).sum().backward()
        return {"y_LD": y_LD, "x.grad": x_LD.grad}


X_TD, GATE_DE, W_ED = numbers(5, 3, seed=2), numbers(3, 6, seed=1), numbers(6, 3, seed=3)
EXPERTS = Even(6)


@bug(
    "B41",
    "vllm-gaudi #1796",
    "C5",
    "expert ids counted over all ranks index the experts held here",
    mesh={"ep": 3},
    refused=Refused(TYPES, "ep", "w_GD", "unless the index counts this rank's own rows"),
    results={"y_TD": {"ep": I}, "w.grad": {"ep": S(0)}},
)
class GlobalExpertIds:
    @staticmethod
    def one_device() -> Results:
        w_ED = W_ED.clone().requires_grad_()
        best_T = (X_TD @ GATE_DE).argmax(1)
        y_TD = X_TD * w_ED[best_T]
        y_TD.sum().backward()
        return {"y_TD": y_TD.detach(), "w.grad": w_ED.grad}

    @staticmethod
    def wrong() -> None:
        x_TD, gate_DE = mine(X_TD, {"ep": R}), mine(GATE_DE, {"ep": R})
        w_GD = mine(W_ED, {"ep": S(0)}, grad=True)
        best_T = (x_TD @ gate_DE).argmax(1)
        w_TD = w_GD[best_T]
        y_TD = all_reduce(x_TD * w_TD, "ep", src=P, dst=I)
        y_TD.sum().backward()

    @staticmethod
    def right() -> Results:
        x_TD, gate_DE = mine(X_TD, {"ep": R}), mine(GATE_DE, {"ep": R})
        w_GD = mine(W_ED, {"ep": S(0)}, grad=True)
        best_T = (x_TD @ gate_DE).argmax(1)
        owner_T, row_T = to_local(best_T, "ep", EXPERTS)
        row_T = reinterpret(row_T, "ep", src=R, dst=V)
        rank = assert_type(torch.tensor(dist.get_rank()), {"ep": V})
        y_TD = x_TD * w_GD[row_T] * (owner_T == rank).unsqueeze(1)
        y_TD = reinterpret(y_TD, "ep", src=V, dst=P)
        y_TD = all_reduce(y_TD, "ep", src=P, dst=I)
        y_TD.sum().backward()
        return {"y_TD": y_TD, "w.grad": w_GD.grad}


BUGS = (CombineRows, ViewThenGather, WrongLayout, GlobalExpertIds)
