"""`convert` from Invariant to Replicate is that function. A weight may also be declared
Replicate; then nothing is converted, and `reduce_gradients(model)` sums its gradient after
backward, since the type says so."""

from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from placements import I, On, R, S, convert, typed


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], On(tp=S(0))],
    gate: Annotated[Float[Tensor, "D E"], On(tp=I)],
) -> Annotated[Float[Tensor, "T E"], On(tp=S(0))]:
    return x @ convert(gate, "tp", src=I, dst=R)
