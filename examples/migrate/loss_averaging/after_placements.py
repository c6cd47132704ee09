"""`global_mean` sums the numerator and the count over the axis, and divides once. The count
is a tensor: where all tokens are valid, `torch.ones_like(losses).sum()`. A plain number,
such as the number of tokens in all, is taken for the count of all ranks. So a number of
this rank's own tokens (`losses.numel()`) is refused by `typecheck()`, and wrong without."""

from typing import Annotated

from jaxtyping import Float, Int
from torch import Tensor

from placements import I, On, R, S, convert, global_mean, typed


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], On(dp=S(0))],
    w: Annotated[Float[Tensor, "D 1"], On(dp=I)],
    valid: Annotated[Int[Tensor, " T"], On(dp=S(0))],
) -> Annotated[Float[Tensor, ""], On(dp=I)]:
    losses = (x @ convert(w, "dp", src=I, dst=R)).square().squeeze(1) * valid
    return global_mean(losses.sum(), valid.sum(), "dp")
