"""C5 for the peers: which token, which row, which expert."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate

from placements import I, P, R, S, V, all_gather, all_reduce, reinterpret
from spmd_moe.bugs.peers.words import from_local, locally, placed
from spmd_moe.bugs.programs.c05_provenance import W_16_8, X_484
from spmd_moe.bugs.record import Results, mine, numbers

X_BLD, W_TD = numbers(2, 4, 4), numbers(8, 4, seed=1)


def scattered(x_BLD: Tensor, rank: int, *, strided: bool) -> Tensor:
    """This rank's rows at their places among all of them, zeros elsewhere."""
    rows, length = x_BLD.shape[0] * x_BLD.shape[1], x_BLD.shape[1]
    here_T = torch.arange(rows)
    if strided:
        sequence_T = torch.div(here_T, length, rounding_mode="floor")
        token_T = sequence_T * 2 * length + rank * length + here_T % length
    else:
        token_T = here_T + rank * rows
    empty_TD = torch.zeros(8, 4).double()
    return empty_TD.index_add(0, token_T, x_BLD.flatten(0, 1) ** 2)


def combined(strided: bool) -> Results:
    x_BLD = mine(X_BLD, {"tp": S(1)}, grad=True)
    rank = dist.get_rank()
    y_TD = locally(lambda: scattered(x_BLD, rank, strided=strided), {"tp": P})
    y_TD = all_reduce(y_TD, "tp", src=P, dst=I)
    (y_TD * mine(W_TD, {"tp": I})).sum().backward()
    return {"y_TD": y_TD, "x.grad": x_BLD.grad}


def combined_in_dtensor(strided: bool) -> Results:
    x_BLD = placed(X_BLD, {"tp": S(1)}, grad=True)
    y_TD = scattered(x_BLD.to_local(), dist.get_rank(), strided=strided)
    y_TD = from_local(y_TD, Partial()).redistribute(placements=[Replicate()])
    (y_TD * placed(W_TD, {"tp": R})).sum().backward()
    return {"y_TD": y_TD, "x.grad": x_BLD.grad}


class B35:
    # Pieces of equal length; the rows of two sequences still alternate.
    @staticmethod
    def wrong_for_peers() -> Results:
        return combined(False)

    @staticmethod
    def right_for_peers() -> Results:
        return combined(True)

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return combined_in_dtensor(False)

    @staticmethod
    def right_for_dtensor() -> Results:
        return combined_in_dtensor(True)


class B36:
    @staticmethod
    def wrong_for_peers() -> Results:
        x_484 = mine(X_484, {"tp": S(1)}, grad=True)
        full_16_8 = all_gather(x_484.view(-1, 8), "tp", src=S(0), dst=I)
        (full_16_8 * mine(W_16_8, {"tp": I})).sum().backward()
        return {"full_16_8": full_16_8, "x.grad": x_484.grad}

    @staticmethod
    def right_for_peers() -> Results:
        x_484 = mine(X_484, {"tp": S(1)}, grad=True)
        full_16_8 = all_gather(x_484, "tp", src=S(1), dst=I).view(16, 8)
        (full_16_8 * mine(W_16_8, {"tp": I})).sum().backward()
        return {"full_16_8": full_16_8, "x.grad": x_484.grad}


X_LD, W_LD = numbers(8, 3, seed=8), numbers(8, 3, seed=9)


def summed_sequence(undo: bool) -> Results:
    x_LD = mine(X_LD, {"cp": S(0)}, grad=True)
    full_LD = all_gather(x_LD, "cp", src=S(0), dst=I)
    if undo:  # as if each rank held a run of the first half and one of the second
        full_LD = full_LD.view(2, 2, 2, 3).transpose(0, 1).reshape(8, 3)
    y_LD = full_LD.cumsum(0)
    (y_LD * mine(W_LD, {"cp": I})).sum().backward()
    return {"y_LD": y_LD, "x.grad": x_LD.grad}


class B39:
    @staticmethod
    def wrong_for_peers() -> Results:
        return summed_sequence(True)

    @staticmethod
    def right_for_peers() -> Results:
        return summed_sequence(False)


T_TD, GATE_DE, W_ED = numbers(5, 3, seed=2), numbers(3, 6, seed=1), numbers(6, 3, seed=3)

OWN_GD = W_ED.view(3, 2, 3)


def kernel(x_TD: Tensor, w_GD: Tensor, ids_T: Tensor, window: range) -> Tensor:
    """The experts held here; ids outside the window are another rank's."""
    y_TD = x_TD * w_GD[0] * 0
    for slot in range(w_GD.shape[0]):
        if slot in window:
            y_TD = y_TD + x_TD * w_GD[slot] * (ids_T == slot).unsqueeze(1)
    return y_TD


def chosen_experts(translate: bool) -> Results:
    x_TD, w_GD = mine(T_TD, {"ep": R}), mine(OWN_GD, {"ep": V}, grad=True)
    ids_T = (x_TD @ mine(GATE_DE, {"ep": R})).argmax(1)
    first = 2 * dist.get_rank()
    window = range(2) if translate else range(first, first + 2)

    def body() -> Tensor:
        y_TD = kernel(x_TD, w_GD, ids_T - first if translate else ids_T, window)
        return reinterpret(y_TD, "ep", src=V, dst=P)

    y_TD = all_reduce(locally(body, {"ep": P}), "ep", src=P, dst=I)
    y_TD.sum().backward()
    return {"y_TD": y_TD, "w.grad": w_GD.grad}


def chosen_in_dtensor(translate: bool) -> Results:
    w_GD = placed(W_ED, {"ep": S(0)}, grad=True)
    ids_T, first = (T_TD @ GATE_DE).argmax(1), 2 * dist.get_rank()
    window = range(2) if translate else range(first, first + 2)
    ids_T = ids_T - first if translate else ids_T
    y_TD = from_local(kernel(T_TD, w_GD.to_local(), ids_T, window), Partial())
    y_TD = y_TD.redistribute(placements=[Replicate()])
    y_TD.sum().backward()
    return {"y_TD": y_TD, "w.grad": w_GD.grad}


class B41:
    @staticmethod
    def wrong_for_peers() -> Results:
        return chosen_experts(False)

    @staticmethod
    def right_for_peers() -> Results:
        return chosen_experts(True)

    @staticmethod
    def wrong_for_dtensor() -> Results:
        return chosen_in_dtensor(False)

    @staticmethod
    def right_for_dtensor() -> Results:
        return chosen_in_dtensor(True)
