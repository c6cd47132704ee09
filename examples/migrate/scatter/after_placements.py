"""Nothing is padded: pieces may be unequal, and empty. A scatter along a dim that is not
cut stays in the rank, and its result is cut as the target is; the counts are Partial."""

from typing import Annotated

from jaxtyping import Float, Int
from torch import Tensor

from examples.migrate.scatter.one_device import chosen_experts
from placements import I, On, P, Padded, R, S, all_gather, all_reduce, convert, typed


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], On(tp=I)],
    gate: Annotated[Float[Tensor, "D E"], On(tp=I)],
) -> tuple[
    Annotated[Float[Tensor, "T E"], On(tp=I)], Annotated[Int[Tensor, " E"], On(tp=I)]
]:
    tokens = S(0, Padded(x.shape[0]))
    scores = convert(x, "tp", src=I, dst=tokens) @ convert(gate, "tp", src=I, dst=R)
    chosen = chosen_experts(scores)
    counts = all_reduce(chosen.sum(0), "tp", src=P, dst=I).long()
    return all_gather(scores * chosen, "tp", src=tokens, dst=I), counts
