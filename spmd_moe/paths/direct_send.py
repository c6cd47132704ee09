"""Round robin's rows to send, made without an index: strided tokens, repeated.

If each token has as many choices as each rank has experts (K == G), round robin gives
token t all experts of rank t % W, and each expert of rank q the tokens q, q + W, ... in
order. So the rows of rank q are `x[q::W]`, once for each of its experts. With gates before
the experts the copies of a token differ, and there is no shortcut.
"""

import torch
from torch import Tensor

from placements import unchecked
from spmd_moe.paths.equal_split import Exchange
from spmd_moe.paths.recorder import ran
from spmd_moe.paths.round_robin import Turns


def goes_direct(turns: Turns, ranks: int, *, weigh: bool) -> bool:
    """Return whether rows of these turns can be made so; `weigh`: gates come first."""
    return not weigh and turns.choices * ranks == turns.experts


def direct_rows(x_TD: Tensor, choices: int, exchange: Exchange) -> Tensor:
    """This rank's own tokens -> what to send, rank by rank, padded if the splits are.

    Backward: a token's gradient is the sum over its copies.
    """
    ran("direct_send")
    with unchecked():
        tokens = x_TD.shape[0]
    ranks, size = len(exchange.sent), exchange.size
    for rank, split in enumerate(exchange.sent):
        piece = len(range(rank, tokens, ranks))
        if piece * choices != split:
            raise ValueError(
                f"rank {rank} is to get {split} rows, but {choices} times its {piece} of "
                f"{tokens} tokens in turn are {piece * choices}: the rows are not those of "
                "round robin with as many choices as experts on each rank"
            )
    if tokens % ranks == 0:  # one copy; the splits are equal, and size is theirs
        parts = torch.unflatten(x_TD, 0, (tokens // ranks, ranks)).transpose(0, 1)
        return parts.unsqueeze(1).expand(-1, choices, -1, -1).flatten(0, 2)
    made: list[Tensor] = []
    for rank, split in enumerate(exchange.sent):
        made.append(x_TD[rank::ranks].repeat(choices, 1))
        if size is not None and split < size:
            made.append(x_TD.new_zeros(size - split, x_TD.shape[1]))
    return torch.cat(made)
