"""Partial to Invariant: an all-reduce forward, nothing backward. The shared expert repeats
one computation on every rank, and stays Invariant."""

from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from placements import I, On, P, R, S, all_reduce, convert, typed


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], On(tp=I)],
    w1: Annotated[Float[Tensor, "D F"], On(tp=S(1))],
    w2: Annotated[Float[Tensor, "F D"], On(tp=S(0))],
    shared: Annotated[Float[Tensor, "D D"], On(tp=I)],
) -> Annotated[Float[Tensor, "T D"], On(tp=I)]:
    routed = (convert(x, "tp", src=I, dst=R) @ w1).square() @ w2
    return all_reduce(routed, "tp", src=P, dst=I) + x @ shared
