"""Auxiliary losses of a router: load balance, per sequence or over all tokens, and z-loss.

Each is a mean over tokens of the whole batch, and none is a mean of means. What a rank sums
over its own tokens is Partial on the axes that cut them, and Replicate on tp where all tp
ranks route the same tokens. Counts are completed before they are multiplied, and the loss
ends Invariant on every axis: so it can be added to a loss that is Invariant too, and its
gradient counts once, whichever ranks route which tokens.

The layer computes none of these by itself. `keep_routings` keeps the routing of each
forward in its block, and the functions here make a loss of it.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from placements import I, On, Partial, R, current_mesh, in_backward, redistribute, typed
from spmd_moe.config import MoEConfig
from spmd_moe.dims import CountsE, ScoresTE
from spmd_moe.layouts import Layout
from spmd_moe.meshes import ONE_DEVICE, has_axis
from spmd_moe.parameters import Initialised
from spmd_moe.permute import routing_map
from spmd_moe.route import Routing

Loss: TypeAlias = Annotated[Float[Tensor, ""], On(dp=I, cp=I, tp=I)]
WholeCounts: TypeAlias = Annotated[CountsE, On(dp=R, cp=R, tp=R)]


@dataclass(frozen=True)
class Routed:
    """One forward of one layer: where its tokens went, and which sequences they are of."""

    layer: "KeepsRoutings"
    routing: Routing
    shape: torch.Size  # of the input, without its last dim
    seq_len: int
    has_graph: bool  # computed with gradients on


class KeepsRoutings(Initialised):
    """A layer whose routings somebody may keep; see `keep_routings`."""

    config: MoEConfig
    layout: Layout
    keepers: tuple["Keeper", ...] = ()

    def kept(self, routing: Routing, x: Tensor, seq_len: int) -> Routing:
        """Return the routing, after everybody who keeps it has it."""
        for keeper in self.keepers:
            if keeper.in_backward == in_backward():  # not of a recomputation
                graph = torch.is_grad_enabled()
                routed = Routed(self, routing, x.shape[:-1], seq_len, graph)
                keeper.routings.append(routed)
        return routing


@dataclass(frozen=True)
class Keeper:
    """A block of `keep_routings`: what it has kept, and whether it is run by backward."""

    routings: list[Routed]
    in_backward: bool


@contextmanager
def keep_routings(module: nn.Module) -> Generator[list[Routed]]:
    """Keep the routing of every forward of every MoE layer in `module`, in their order.

        with keep_routings(model) as routings:
            loss = model.loss(model(ids), targets)
        loss = loss + sum(0.01 * load_balance_loss(routed) for routed in routings)

    What activation checkpointing computes again is not kept again. A routing holds the
    graph of its forward, so let go of the list after backward.
    """
    keeper = Keeper([], in_backward())
    every = cast(Iterable[nn.Module], module.modules())
    layers = [layer for layer in every if isinstance(layer, KeepsRoutings)]
    if not layers:
        raise ValueError(
            f"keep_routings: {type(module).__name__} has no MoE layer; give it the model "
            "that has them"
        )
    for layer in layers:
        layer.keepers = (*layer.keepers, keeper)
    try:
        yield keeper.routings
    finally:
        for layer in layers:
            layer.keepers = tuple(one for one in layer.keepers if one is not keeper)


@typed
def load_balance_loss(*routed: Routed, counts_E: WholeCounts | None = None) -> Loss:
    """E * sum_e (fraction of slots at e) * (mean probability of e), over all tokens.

    It is 1 where all experts get equally many tokens. Fractions and means are those of the
    whole batch over dp, cp and tp. A batch in several microbatches is all of their
    routings: the mean of the microbatches' losses is another loss. To run backward for each
    microbatch alone, give `counts_E` of all of them (`total_counts`): then each call is
    this microbatch's share, and the shares add up to the loss of the whole batch.
    Communicates: counts over each axis that cuts tokens, and one number over each.
    """
    return _of_batch(routed, counts_E)


@typed
def sequence_balance_loss(*routed: Routed, counts_E: WholeCounts | None = None) -> Loss:
    """The load balance loss of each sequence by itself, and the mean over sequences.

    Needs an input of shape (..., L, D), because (T, D) does not say where sequences end.
    `counts_E` and what is sent are as in `load_balance_loss`, but counts are sent by
    sequence over cp and tp.
    """
    return _of_batch(routed, counts_E, by_sequence=True)


@typed
def z_loss(*routed: Routed, counts_E: WholeCounts | None = None) -> Loss:
    """The mean over all tokens of logsumexp(logits) squared: it keeps logits small.

    `counts_E` and what is sent are as in `load_balance_loss`.
    """
    first = _first(routed)
    counts_E = _whole(routed, counts_E)
    total = torch.stack([_logits(one).logsumexp(1).square().sum() for one in routed]).sum()
    return _mean(total, counts_E, first)


@typed
def total_counts(*routed: Routed) -> WholeCounts:
    """Return how many slots went to each expert, over all ranks: Replicate everywhere.

    Communicates: one all-reduce on every axis that cuts tokens.
    """
    first = _first(routed)
    counts_E = torch.stack([one.routing.counts_E for one in routed]).sum(0)
    return _complete(counts_E, first.layer.layout, ("dp", "cp", "tp"))


def _whole(routed: tuple[Routed, ...], counts_E: Tensor | None) -> Tensor:
    """Return the counts of the whole step: those that are given, else of these routings."""
    if counts_E is None:
        return total_counts(*routed)
    experts = routed[0].layer.config.num_experts
    if counts_E.shape != (experts,):
        raise ValueError(
            f"counts_E of shape {tuple(counts_E.shape)}: expected one count for each of "
            f"the {experts} experts, as total_counts(*routings) gives them"
        )
    return counts_E


def _of_batch(
    routed: tuple[Routed, ...], counts_E: Tensor | None, *, by_sequence: bool = False
) -> Tensor:
    """Return E / (K n) * sum (slots at e) * (probabilities of e), divided by all tokens.

    `n` is the number of tokens among which slots are counted.
    """
    first = _first(routed)
    whole_E = _whole(routed, counts_E)
    experts, choices = first.layer.config.num_experts, first.layer.config.top_k
    if by_sequence:
        totals = [_by_sequence(one) for one in routed]
        total = torch.stack(totals).sum() * experts / (choices * first.seq_len)
    else:
        shares = [_probabilities(one).sum(0) for one in routed]
        share_E = torch.stack(shares).sum(0)
        total = (share_E * whole_E).sum() * experts / whole_E.sum()
    return _mean(total, whole_E, first)


def _by_sequence(routed: Routed) -> Tensor:
    """Return sum over sequences of sum_e (slots at e) * (probabilities of e)."""
    layout, experts = routed.layer.layout, routed.layer.config.num_experts
    batch = routed.shape[:-1]
    if not batch:
        raise ValueError(
            "sequence_balance_loss: the layer was called with x of shape (T, D), which "
            "does not say where a sequence ends; call it with (B, L, D)"
        )
    ids_TK = routed.routing.expert_ids_TK
    slots_BLE = torch.unflatten(routing_map(ids_TK, experts), 0, (*batch, -1))
    counts_BE = _complete(slots_BLE.sum(-2), layout, ("cp", "tp"))
    share_BE = torch.unflatten(_probabilities(routed), 0, (*batch, -1)).sum(-2)
    return (share_BE * counts_BE).sum()


@typed
def _probabilities(
    routed: Routed,
) -> Annotated[ScoresTE, On("{routed.layer.layout.routing}")]:
    """Return each token's scores, with sum 1 over the experts."""
    logits_TE = _logits(routed)
    if routed.layer.config.score_function == "softmax":
        return logits_TE.softmax(1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / scores_TE.sum(1, keepdim=True)


def _logits(routed: Routed) -> Tensor:
    logits_TE = routed.routing.logits_TE
    if logits_TE is None:
        raise ValueError(
            "this routing has no logits_TE, of which auxiliary losses are made: a router "
            "of your own must give them to its Routing"
        )
    if torch.is_grad_enabled() and not routed.has_graph:
        raise ValueError(
            "this routing was computed without a graph, so an auxiliary loss of it would "
            "have no gradient: it was made under no_grad, or inside reentrant activation "
            "checkpointing; use checkpoint(..., use_reentrant=False), or compute the loss "
            "inside the checkpointed function and return it"
        )
    return logits_TE


def _complete(counts: Tensor, layout: Layout, axes: tuple[str, ...]) -> Tensor:
    """Partial -> Replicate on `axes`, where the tokens that were counted are cut."""
    mesh = current_mesh() or ONE_DEVICE
    for axis in axes:
        src = layout.counts_E[axis]
        if isinstance(src, Partial) and has_axis(mesh, axis):
            counts = redistribute(counts, axis, src=src, dst=R)
    return counts


def _mean(total: Tensor, counts_E: Tensor, routed: Routed) -> Tensor:
    """A sum over tokens, Partial or Replicate -> Invariant, divided by all tokens."""
    mesh, layer = current_mesh() or ONE_DEVICE, routed.layer
    mean = total * layer.config.top_k / counts_E.sum()
    for axis, src in layer.layout.counts_E.items():
        if has_axis(mesh, axis):
            mean = redistribute(mean, axis, src=src, dst=I)
    return mean


def _first(routed: tuple[Routed, ...]) -> Routed:
    """Return the first; ValueError unless all are of one layer and one length."""
    if not routed:
        raise ValueError("expected the routings of a layer, of one forward at least")
    for one in cast(tuple[object, ...], routed):
        if not isinstance(one, Routed):
            raise TypeError(
                f"expected what `keep_routings` kept, not {type(one).__name__}: "
                "load_balance_loss(*routings) for all forwards of one layer"
            )
    first = routed[0]
    for one in routed[1:]:
        if one.layer is not first.layer:
            raise ValueError(
                "these are routings of different layers: a loss is that of one layer, so "
                "call it for the routings of each, and add the results"
            )
        if one.seq_len != first.seq_len:
            raise ValueError(
                f"these are routings of sequences of {first.seq_len} and of {one.seq_len} "
                "tokens; expected one length"
            )
    return first
