"""The type says how the dim is cut, and the collective sends pieces of unequal length."""

from typing import Annotated

from jaxtyping import Float
from torch import Tensor

from examples.migrate.uneven_sequences.one_device import TOKENS
from placements import I, On, Padded, S, all_gather, typed

PIECES = S(0, Padded(TOKENS))


@typed
def program(
    x: Annotated[Float[Tensor, "T D"], On(tp=PIECES)],
) -> Annotated[Float[Tensor, "N D"], On(tp=I)]:
    return all_gather(x.square(), "tp", src=PIECES, dst=I)
