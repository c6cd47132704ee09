"""The product of the second weight is Partial, so a whole bias cannot be added to it. It is
added after the sum. (Before the sum, `convert(bias, "etp", src=R, dst=P)` makes it a
Partial: the bias on one rank, and zeros on the others. Nobody divides.)"""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from placements import I, On, P, R, S, all_reduce, convert, typed


@typed
def program(
    rows: Annotated[Float[Tensor, "E C D"], On(etp=I)],
    w1: Annotated[Float[Tensor, "E D F"], On(etp=S(2))],
    w2: Annotated[Float[Tensor, "E F D"], On(etp=S(1))],
    bias: Annotated[Float[Tensor, "E 1 D"], On(etp=I)],
) -> Annotated[Float[Tensor, "E C D"], On(etp=I)]:
    x = convert(rows, "etp", src=I, dst=R)
    y = torch.bmm(torch.bmm(x, w1).square(), w2)
    return all_reduce(y, "etp", src=P, dst=I) + bias
