"""`to_local` says which rank has a row, and where. No window is computed from the rank, and
a row of another rank's piece cannot be read: the type of an index says what it counts. The
signature of the loss says which logits it takes."""

from typing import Annotated

import torch
from jaxtyping import Float, Int
from torch import Tensor

from placements import (
    Even,
    I,
    On,
    P,
    R,
    S,
    V,
    all_reduce,
    axis_rank,
    convert,
    reinterpret,
    to_local,
    typed,
)

VOCABULARY = Even(6)


def own_rows(ids: Tensor) -> tuple[Tensor, Tensor]:
    owner, row = to_local(convert(ids, "tp", src=I, dst=R), "tp", VOCABULARY)
    return reinterpret(row, "tp", src=R, dst=V), (owner == axis_rank("tp")).unsqueeze(1)


@typed
def embed(
    ids: Annotated[Int[Tensor, " T"], On(tp=I)],
    table: Annotated[Float[Tensor, "V D"], On(tp=S(0))],
) -> Annotated[Float[Tensor, "T D"], On(tp=I)]:
    row, is_mine = own_rows(ids)
    found = torch.where(is_mine, table[row], 0)
    return all_reduce(reinterpret(found, "tp", src=V, dst=P), "tp", src=P, dst=I)


@typed
def vocab_parallel_loss(
    logits: Annotated[Float[Tensor, "T V"], On(tp=S(1))],
    labels: Annotated[Int[Tensor, " T"], On(tp=I)],
) -> Annotated[Float[Tensor, ""], On(tp=I)]:
    row, is_mine = own_rows(labels)
    found = torch.where(is_mine, logits.gather(1, row.unsqueeze(1)), 0).squeeze(1)
    target = all_reduce(reinterpret(found, "tp", src=V, dst=P), "tp", src=P, dst=I)
    total = all_reduce(logits.square().sum(1), "tp", src=P, dst=I)
    return (total - 2 * target).sum()


@typed
def program(
    ids: Annotated[Int[Tensor, " T"], On(tp=I)],
    labels: Annotated[Int[Tensor, " T"], On(tp=I)],
    table: Annotated[Float[Tensor, "V D"], On(tp=S(0))],
) -> Annotated[Float[Tensor, ""], On(tp=I)]:
    x = convert(embed(ids, table), "tp", src=I, dst=R)
    return vocab_parallel_loss(x @ table.T, labels)
