"""Annotated code as a user writes it: pyright and mypy --strict must accept it."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from placements import (
    I,
    Index,
    On,
    P,
    Padded,
    R,
    S,
    all_reduce,
    assert_type,
    convert,
    ledger,
    set_current_mesh,
    type_of,
    typecheck,
    typed,
)

Tokens = Annotated[Float[Tensor, "T D"], On(dp=S(0), tp="t")]


@typed
def scaled(x_TD: Tokens, scale: float = 2.0) -> Tokens:
    return x_TD * scale


@typed
@dataclass(frozen=True)
class Routing:
    gates_TK: Annotated[Float[Tensor, "T K"], On(tp="t")]
    ids_TK: Annotated[Int[Tensor, "T K"], On(tp="t")]


@typed
class Gate(nn.Module):
    w_ED: Annotated[Float[Tensor, "E D"], On(dp=R, tp=R)]

    def __init__(self, num_experts: int, dim: int) -> None:
        super().__init__()
        self.w_ED = nn.Parameter(torch.randn(num_experts, dim))

    def forward(self, x_TD: Tokens) -> Annotated[Float[Tensor, "T E"], On(tp="t")]:
        return x_TD @ self.w_ED.T


def program() -> Routing:
    with set_current_mesh({"dp": 2, "tp": 4}), typecheck(), ledger() as record:
        x: Tensor = assert_type(torch.randn(6, 8), {"dp": S(0), "tp": S(0, Padded(23))})
        y = scaled(x, scale=3.0)
        total: Tensor = all_reduce(y.sum(0), "tp", src=P, dst=I)
        whole = convert(total, "tp", src=I, dst=R)
        known = type_of(whole)
        assert known is not None and record.nbytes() > 0
        ids = assert_type(torch.zeros(6, 2, dtype=torch.int64), known, index=Index(8))
        return Routing(gates_TK=y[:, :2], ids_TK=ids)
