"""A program that every rank computes rightly and that is wrong all the same."""

from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import linear

from placements import (
    I,
    On,
    PlacementError,
    R,
    S,
    assert_type,
    set_current_mesh,
    typecheck,
    typed,
)
from spmd_moe.dims import ED, TD, ScoresTE

STORY = (
    "One refused program: the router on x_TD as it comes in C4, without the conversion "
    "that the layer makes. Every rank computes the right scores, but each has only its own "
    "use of x_TD in the gradient, and nobody sums them over tp:"
)


@typed
def score(
    x_TD: Annotated[TD, On(dp=S(0), tp=I)], w_gate_ED: Annotated[ED, On(dp=R, tp=R)]
) -> Annotated[ScoresTE, On(dp=S(0), tp=R)]:
    return linear(x_TD, w_gate_ED).sigmoid()


def refused_program() -> PlacementError | None:
    """Return the error of the checker; None if it accepts the program, which is wrong."""
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x_TD: Tensor = assert_type(torch.ones(6, 16), {"dp": S(0), "tp": I})
        w_gate_ED = assert_type(torch.ones(8, 16), {"dp": R, "tp": R})
        try:
            score(x_TD, w_gate_ED)
        except PlacementError as error:
            return error
    return None
