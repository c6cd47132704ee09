"""Typed modules as users write them, for `spmd-moe check --module`."""

from collections.abc import Mapping
from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor, nn

from placements import I, On, P, R, S, V, all_reduce, convert, typed

TD = Float[Tensor, "T D"]


@typed
class MLP(nn.Module):
    """Megatron's: hidden units cut over tp."""

    w_DF: Annotated[Float[Tensor, "D F"], On(dp=R, tp=S(1))]
    v_FD: Annotated[Float[Tensor, "F D"], On(dp=R, tp=S(0))]

    def __init__(self) -> None:
        super().__init__()
        self.w_DF = nn.Parameter(torch.randn(4, 6))
        self.v_FD = nn.Parameter(torch.randn(6, 4))

    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=I)], *, scale: float = 1.0
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        x_TD = convert(x_TD, "tp", src=I, dst=R)
        y_TD = (x_TD @ self.w_DF).tanh() @ self.v_FD
        return all_reduce(y_TD * scale, "tp", src=P, dst=I)


@typed
class MLPWithReference(MLP):
    @staticmethod
    def reference(x_TD: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return (x_TD @ weights["w_DF"]).tanh() @ weights["v_FD"]


@typed
class WrongReference(MLP):
    @staticmethod
    def reference(x_TD: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        return (x_TD @ weights["w_DF"]).relu() @ weights["v_FD"]


@typed
class ForgotConvert(MLP):
    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=I)]
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        return all_reduce((x_TD @ self.w_DF).tanh() @ self.v_FD, "tp", src=P, dst=I)


@typed
class NeedsNumber(MLP):
    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=I)], scale: float
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        return x_TD * scale


class _Undeclared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


@typed
class HasUndeclared(_Undeclared):
    def forward(self, x_TD: Annotated[TD, On(tp=R)]) -> Annotated[TD, On(tp=R)]:
        return self.inner(x_TD)


@typed
class LeavesOutAnAxis(nn.Module):
    w_D: Annotated[Float[Tensor, " D"], On(tp=R)]

    def __init__(self) -> None:
        super().__init__()
        self.w_D = nn.Parameter(torch.ones(4))

    def forward(self, x_TD: Annotated[TD, On(dp=S(0), tp=R)]) -> Tensor:
        return x_TD * self.w_D


@typed
class TakesVarying(nn.Module):
    def forward(self, x_TD: Annotated[TD, On(ep=V)]) -> Annotated[TD, On(ep=V)]:
        return x_TD * 2
