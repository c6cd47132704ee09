"""`region` takes both types of every argument. Neither has a default, and they must fit:
the gradient of an R is a P. What is known of the ops inside is checked, too."""

from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from examples.migrate.local_map.one_device import experts
from placements import I, On, P, R, S, all_reduce, convert, region, typed

run = region(
    experts,
    ins=[{"tp": R}, {"tp": S(1)}, {"tp": S(0)}],
    grads=[{"tp": P}, {"tp": S(1)}, {"tp": S(0)}],
    outs={"tp": P},
)


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], On(tp=I)],
    w1: Annotated[Float[Tensor, "D F"], On(tp=S(1))],
    w2: Annotated[Float[Tensor, "F D"], On(tp=S(0))],
) -> Annotated[Float[Tensor, "T D"], On(tp=I)]:
    y = run(convert(x, "tp", src=I, dst=R), w1, w2)
    return all_reduce(y, "tp", src=P, dst=I)
