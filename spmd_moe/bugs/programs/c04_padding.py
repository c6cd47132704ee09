"""C4: statistics of the router over rows that are padding."""

# torch does not type `backward`:
# pyright: reportUnknownMemberType=false

import torch
from torch import Tensor

from placements import P, R, S, convert, pad_rows, reduce_gradients
from spmd_moe.bugs.programs.c04_statistics import (
    AXES,
    NUM_TOKENS,
    TOP_K,
    WHOLE,
    X_TD,
    Gate,
    balance_loss,
    summed,
)
from spmd_moe.bugs.record import TYPES, Refused, Results, bug, mine

NUM_ROWS = 12


def padded_pieces() -> tuple[Tensor, Tensor]:
    """This rank's three of twelve rows, and which of them are tokens."""
    pieces = pad_rows(mine(X_TD, WHOLE), 0, to=NUM_ROWS)
    for axis in AXES:
        x_TD, valid_T = (convert(piece, axis, src=R, dst=S(0)) for piece in pieces)
        pieces = x_TD, valid_T
    return pieces


def choices(probs_TE: Tensor) -> Tensor:
    """One for each expert that a row chose."""
    ids_TK = probs_TE.detach().topk(TOP_K, 1).indices
    return torch.zeros_like(probs_TE).scatter(1, ids_TK, 1.0)


@bug(
    "B33",
    "Megatron-LM #1984, #2121, #4776",
    "C4",
    "rows of padding are counted as tokens of the experts they chose",
    mesh={"dp": 2, "tp": 2},
    refused=Refused(TYPES, None, "chosen_TE", "rows of padding"),
    results={"aux": {"dp": P, "tp": P}, "gate.grad": WHOLE},
)
class PaddingCounted:
    @staticmethod
    def one_device() -> Results:
        gate = Gate()
        probs_TE = gate(X_TD).softmax(1)
        aux = balance_loss(probs_TE, choices(probs_TE).sum(0), NUM_TOKENS)
        aux.backward()
        return {"aux": aux, "gate.grad": gate.w_DE.grad}

    @staticmethod
    def wrong() -> None:
        gate = Gate()
        x_TD, _ = padded_pieces()
        probs_TE = gate(x_TD).softmax(1)
        chosen_TE = choices(probs_TE)
        counts_E = summed(chosen_TE.sum(0), *AXES)
        balance_loss(probs_TE, counts_E, NUM_ROWS).backward()
        reduce_gradients(gate)

    @staticmethod
    def right() -> Results:
        gate = Gate()
        x_TD, valid_T = padded_pieces()
        probs_TE = gate(x_TD).softmax(1) * valid_T[:, None]
        chosen_TE = choices(probs_TE) * valid_T[:, None]
        counts_E = summed(chosen_TE.sum(0), *AXES)
        aux = balance_loss(probs_TE, counts_E, NUM_TOKENS)
        aux.backward()
        reduce_gradients(gate)
        return {"aux": aux, "gate.grad": gate.w_DE.grad}


BUGS = (PaddingCounted,)
