"""There is no wrapper to leave: tensors are plain, and `convert` from Invariant to
Replicate is the place where the gradient is summed."""

from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from placements import I, On, R, S, convert, typed


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], On(tp=I)],
    gate: Annotated[Float[Tensor, "D 1"], On(tp=I)],
    w: Annotated[Float[Tensor, "D F"], On(tp=S(1))],
) -> Annotated[Float[Tensor, "T F"], On(tp=S(1))]:
    scores = convert(x @ gate, "tp", src=I, dst=R)
    rows = convert(x, "tp", src=I, dst=R)
    return (rows @ w) * scores
