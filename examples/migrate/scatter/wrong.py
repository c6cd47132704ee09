"""The rows of padding are counted, so each of them chooses experts as a token does. Counts,
and all that is made of them (the expert bias, the sizes of what is sent), are too large
(B45: torchtitan #3622, #4080). `pad_rows` remembers which rows are padding, and a sum over
rows of padding that may hold anything but zero is refused. `spmd_types` has no word for
it."""

from torch import Tensor

from examples.migrate.scatter import after_spmd_types as peer
from examples.migrate.scatter import before as raw
from examples.migrate.scatter.one_device import chosen_experts
from placements import I, P, R, S, all_gather, all_reduce, convert, pad_rows


def before(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return raw.route(x, gate, counted=2)


def after_placements(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    padded, _ = pad_rows(x, 0, to=2)
    mine = convert(padded, "tp", src=I, dst=S(0))
    scores = mine @ convert(gate, "tp", src=I, dst=R)
    chosen = chosen_experts(scores)
    counts = all_reduce(chosen.sum(0), "tp", src=P, dst=I).long()
    return all_gather(scores * chosen, "tp", src=S(0), dst=I)[:1], counts


def after_spmd_types(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return peer.route(x, gate, counted=2)
