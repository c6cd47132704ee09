"""Typed modules as users write them, for `spmd-moe check --module`."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Float32, Int
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


@typed
class NeedsFloat32(MLP):
    def forward(
        self, x_TD: Annotated[Float32[Tensor, "T D"], On(dp=S(0), tp=I)]
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        return x_TD


@typed
class ForgotReduction(MLP):
    """What it returns is Partial on tp, and no annotation says that it must not be."""

    def forward(self, x_TD: Annotated[TD, On(dp=S(0), tp=I)]):
        x_TD = convert(x_TD, "tp", src=I, dst=R)
        return (x_TD @ self.w_DF).tanh() @ self.v_FD


@typed
class SaysTensorAlone(ForgotReduction):
    def forward(self, x_TD: Annotated[TD, On(dp=S(0), tp=I)]) -> Tensor:
        return super().forward(x_TD)


@typed
class LeavesTheResultOpen(ForgotReduction):
    def forward(self, x_TD: Annotated[TD, On(dp=S(0), tp=I)]) -> Annotated[TD, On(dp=S(0))]:
        return super().forward(x_TD)


class NotTyped(ForgotReduction):
    """Its annotation is wrong, but nothing reads it."""

    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=I)]
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        return super().forward(x_TD)


@typed
class UnannotatedArgument(MLP):
    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=I)], mask_TD
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        return x_TD * mask_TD


Rows = Annotated[TD, On(tp=S(0))]


@typed
class ManyResults(nn.Module):
    """Tensors in a dict and a tuple, an integer one, and what is none."""

    def forward(
        self, x_TD: Rows, /, ids_T: Annotated[Int[Tensor, " T"], On(tp=S(0))]
    ) -> dict[str, tuple[Rows, Annotated[Int[Tensor, " T"], On(tp=S(0))], int | None]]:
        assert ids_T.dtype == torch.int64
        return {"both": (x_TD * ids_T[:, None], ids_T + 1, None)}

    @staticmethod
    def reference(x_TD: Tensor, ids_T: Tensor, weights: object) -> list[Tensor]:
        return [x_TD * ids_T[:, None], ids_T + 1]


Flags = Annotated[Bool[Tensor, " T"], On(tp=S(0))]


@typed
class WithoutGradients(nn.Module):
    def forward(self, keep_T: Flags) -> Flags:
        return ~keep_T


class Pair(NamedTuple):
    """Its fields are annotated, but nothing checks them: it is not typed."""

    rows: Rows


@typed
class ReturnsTuple(nn.Module):
    def forward(self, x_TD: Annotated[TD, On(tp=R)]) -> Pair:
        return Pair(x_TD)


class Outer:
    @typed
    class Inner(nn.Module):
        def forward(self, x_TD: Rows) -> Rows:
            return x_TD * 2


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

    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=R)]
    ) -> Annotated[TD, On(dp=S(0), tp=R)]:
        return x_TD * self.w_D


@typed
class TakesVarying(nn.Module):
    def forward(self, x_TD: Annotated[TD, On(ep=V)]) -> Annotated[TD, On(ep=V)]:
        return x_TD * 2


class _Unsummed(torch.autograd.Function):
    """Enters the tensor-parallel region, as it says; nobody sums the gradient."""

    @staticmethod
    def placement_rule(x: dict[str, object]) -> dict[str, object]:
        return {**x, "tp": R}

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


@typed
class Unsummed(MLP):
    """Its types fit; the gradient of its argument differs by rank."""

    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=I)]
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        entered: Tensor = _Unsummed.apply(x_TD)
        return all_reduce((entered @ self.w_DF).tanh() @ self.v_FD, "tp", src=P, dst=I)


class _Halved(torch.autograd.Function):
    @staticmethod
    def placement_rule(x: dict[str, object]) -> dict[str, object]:
        return dict(x)

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0] / 2


@typed
class HalvedWeight(MLP):
    """The gradient of a weight is half of what it should be, on all ranks alike."""

    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=I)]
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        w_DF: Tensor = _Halved.apply(self.w_DF)
        x_TD = convert(x_TD, "tp", src=I, dst=R)
        return all_reduce((x_TD @ w_DF).tanh() @ self.v_FD, "tp", src=P, dst=I)


@typed
class RaisesOnRankOne(MLP):
    def forward(
        self, x_TD: Annotated[TD, On(dp=S(0), tp=I)]
    ) -> Annotated[TD, On(dp=S(0), tp=I)]:
        if (
            torch.distributed.is_initialized()
            and f"{torch.distributed.get_rank():d}" == "1"
        ):
            raise LookupError("no such row")
        return super().forward(x_TD)


@typed
class TwoSizes(MLP):
    """Its argument's letter has two sizes among the parameters."""

    u_D: Annotated[Float[Tensor, " D"], On(dp=R, tp=R)]

    def __init__(self) -> None:
        super().__init__()
        self.u_D = nn.Parameter(torch.randn(5))
