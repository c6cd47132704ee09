"""`convert` sums the gradient of the weight; the gather's backward is a reduce-scatter. A
weight may also be declared Replicate: then `reduce_gradients` sums its gradient after
backward, whatever it is called and whatever flags it has."""

from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from examples.migrate.sequence_parallel_norms.one_device import rms_norm
from placements import I, On, R, S, all_gather, convert, typed


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], On(tp=S(0))],
    norm: Annotated[Float[Tensor, " D"], On(tp=I)],
    w: Annotated[Float[Tensor, "D F"], On(tp=S(1))],
) -> Annotated[Float[Tensor, "N F"], On(tp=S(1))]:
    rows = rms_norm(x, convert(norm, "tp", src=I, dst=R))
    return all_gather(rows, "tp", src=S(0), dst=R) @ w
