"""A learnable sink for each attention head is cut over `tp`, and lacks the flag: it is
taken for a copy, and the heads of the other ranks are missing in the norm (B62:
Megatron-LM #7452, finding 8, and #7530). Every gradient is too large by the same factor,
which no loss curve shows. Here the flag is the type, and the forward reads it too: a sink
declared Replicate does not fit scores that are cut over heads."""

from torch import Tensor

from examples.migrate.gradient_clipping import after_placements as ours
from examples.migrate.gradient_clipping import after_spmd_types as peer
from examples.migrate.gradient_clipping import before as raw
from examples.migrate.gradient_clipping.one_device import Heads
from placements import R, declare


def before(scores: Tensor, sink: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return raw.trained(Heads(sink, scale), scores)


def after_placements(
    scores: Tensor, sink: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    heads = Heads(sink, scale)
    declare(heads, {"sink": {"tp": R}, "scale": {"tp": R}})
    return ours.trained(heads, scores)


def after_spmd_types(
    scores: Tensor, sink: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return peer.trained(peer.declared(scores, sink, scale), scores, cut=set())
