"""Flattening `S(1)` gives a `Folded` extent: a run of rows for each sequence. `to_global`
reads the place of a row from it; no arithmetic makes an index."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from examples.migrate.token_indices.one_device import LENGTH, SEQUENCES
from placements import (
    Even,
    Folded,
    I,
    On,
    P,
    S,
    all_reduce,
    assert_type,
    row_numbers,
    to_global,
    typed,
)

TOKENS = Folded(SEQUENCES, Even(LENGTH))


@typed
def program(
    x: Annotated[Float[Tensor, "B L D"], On(tp=S(1))],
) -> Annotated[Float[Tensor, "T D"], On(tp=I)]:
    rows = x.flatten(0, 1).square()
    token = to_global(row_numbers(rows, 0), "tp", TOKENS)
    empty = torch.zeros(SEQUENCES * LENGTH, 4, dtype=rows.dtype)
    y = assert_type(empty, {"tp": P}).index_add(0, token, rows)
    return all_reduce(y, "tp", src=P, dst=I)
