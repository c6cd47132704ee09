"""A sum over a cut dim is Partial, on every axis that cuts it. The types name the axes."""

from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from examples.migrate.counts_and_bias.one_device import counted, updated
from placements import On, P, R, S, all_reduce, typed


@typed
def program(
    scores: Annotated[Float[Tensor, "T E"], On(dp=S(0), tp=S(0))],
    bias: Annotated[Float[Tensor, " E"], On(dp=R, tp=R)],
) -> Annotated[Float[Tensor, " E"], On(dp=R, tp=R)]:
    counts = counted(scores, bias)
    for axis in ("dp", "tp"):
        counts = all_reduce(counts, axis, src=P, dst=R)
    return updated(bias, counts)
