"""Router: scores, the choice of experts, and the gates. Knows nothing of dispatch.

The gate weight is Replicate on every axis of the dense mesh, in storage and in use, so its
gradient is Partial on all of them: with EP each tp rank has its own tokens, and without it
each has its share of every token's gradient. No collective is hidden here; the caller's
`reduce_gradients` reads the type and sums once.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import linear

from placements import (
    Index,
    Mesh,
    On,
    Partial,
    Varying,
    assert_type,
    reinterpret,
    type_of,
    typed,
    unchecked,
)
from spmd_moe.balance import LoadBalance
from spmd_moe.config import MoEConfig
from spmd_moe.dims import ED, TD, CountsE, GatesTK, IdsTK, ScoresTE
from spmd_moe.layouts import Layout
from spmd_moe.parameters import Initialised, Spec
from spmd_moe.paths.own import own_rows, own_size
from spmd_moe.paths.round_robin import Turns
from spmd_moe.permute import check_ids, count_own
from spmd_moe.precision import wide_dtype, without_autocast

# Keeps a sum of gates that are all zero from dividing by zero.
TINY = 1e-20


@typed
@dataclass(frozen=True)
class OwnCounts:
    """How many of this rank's own slots each expert gets, counted once.

    `slots` says of how many slots that is: counts of tokens that were split afterwards are
    not those of a piece. `turns` are the slots if they were dealt by round robin.
    """

    counts_E: CountsE
    slots: int
    turns: Turns | None = None


@typed
@dataclass(frozen=True)
class Routing:
    """Where every token goes, and with which weights.

    Raises ValueError if an id is none of the experts that are counted. The ids are checked
    here and nowhere later, because every router, also one of the user's, makes a Routing.
    The logits are for auxiliary losses alone. `own` saves the dispatcher counting; a router
    may leave it out.
    """

    gates_TK: Annotated[GatesTK, On(dp="d", cp="c", tp="t")]
    expert_ids_TK: Annotated[IdsTK, On(dp="d", cp="c", tp="t")]
    counts_E: CountsE
    logits_TE: Annotated[ScoresTE, On(dp="d", cp="c", tp="t")] | None = None
    own: OwnCounts | None = None

    def __post_init__(self) -> None:
        check_ids(self.expert_ids_TK, self.counts_E.shape[0])


@typed
class Router(Initialised):
    """Token choice: each token takes its `top_k` best experts."""

    w_gate_ED: Annotated[ED, On("{self.layout.w_gate_ED}")]

    def __init__(
        self,
        config: MoEConfig,
        layout: Layout,
        mesh: Mesh,
        *,
        seed: int = 0,
        device: "torch.device | str | None" = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layout = layout
        shape = (config.num_experts, config.dim)
        specs = {"w_gate_ED": Spec(shape, layout.w_gate_ED, mesh)}
        self.declare_specs(specs, seed, device=device, dtype=dtype)
        self.balance = LoadBalance(config, layout, mesh, device=device)
        self.reset_own()

    def forward(self, x_TD: Annotated[TD, On("{self.layout.tokens}")]) -> Routing:
        """tokens placed as t -> gates and ids placed as t, counts Partial where t cuts.

        Communicates nothing.
        """
        logits_TE = self.logits(x_TD)
        scores_TE = self.score(logits_TE)
        expert_ids_TK = self.choose(scores_TE.detach())
        gates_TK = self.weigh(scores_TE.gather(1, expert_ids_TK))
        own = self.count(expert_ids_TK)
        counts_E = summands(own.counts_E, self.layout)
        self.balance.record(counts_E)
        return Routing(gates_TK, expert_ids_TK, counts_E, logits_TE, own)

    @typed
    def count(self, expert_ids_TK: IdsTK) -> OwnCounts:
        """Count this rank's own slots by expert; those of round robin are known."""
        experts, choices = self.config.num_experts, self.config.top_k
        slots = own_size(expert_ids_TK)
        if not self.config.round_robin or torch.compiler.is_compiling():
            return OwnCounts(count_own(own_rows(expert_ids_TK), experts), slots)
        turns = Turns(slots // choices, choices, experts)
        with unchecked():
            counts_E = torch.tensor(turns.counts(), device=expert_ids_TK.device)
        assert_type(counts_E, self.layout.slots)
        return OwnCounts(counts_E, slots, turns)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the logits of the scores: float32 at least, also under autocast."""
        wide = wide_dtype(x_TD, self.w_gate_ED)
        with without_autocast(x_TD):  # it would choose other experts
            return linear(x_TD.to(wide), self.w_gate_ED.to(wide))

    @typed
    def score(
        self, logits_TE: ScoresTE
    ) -> Annotated[ScoresTE, On("{self.layout.routing}")]:
        """Score each expert for each token."""
        if self.config.score_function == "softmax":
            return logits_TE.softmax(1)
        return logits_TE.sigmoid()

    @typed
    def choose(
        self, scores_TE: ScoresTE
    ) -> Annotated[IdsTK, On("{self.layout.expert_ids}")]:
        """Choose the experts of each token; the bias changes nothing but the choice."""
        if self.config.round_robin:
            return round_robin(scores_TE, self.config.top_k)
        biased_TE = scores_TE + self.balance.bias_for(scores_TE)
        groups, limit = self.config.num_expert_groups, self.config.num_limited_groups
        if groups is not None and limit is not None:
            biased_TE = keep_best_groups(biased_TE, groups, limit)
        return biased_TE.topk(self.config.top_k, dim=1, sorted=False).indices

    @typed
    def weigh(self, gates_TK: GatesTK) -> Annotated[GatesTK, On("{self.layout.routing}")]:
        """Make gates of the chosen scores: normalised and scaled if the config says so."""
        if self.config.route_norm:
            gates_TK = gates_TK / (gates_TK.sum(1, keepdim=True) + TINY)
        return gates_TK * self.config.route_scale


@typed
def summands(own_E: CountsE, layout: Layout) -> Annotated[CountsE, On("{layout.counts_E}")]:
    """Varying -> Partial, as the table says: the counts of each rank are summands."""
    known = type_of(own_E)
    for axis, t in known.items() if known is not None else ():
        if t == Varying():
            own_E = reinterpret(own_E, axis, src=Varying(), dst=Partial())
    return own_E


def round_robin(scores_TE: Tensor, top_k: int) -> Tensor:
    """Send slot j of this rank to expert j % E: balanced, whatever the scores.

    Every rank numbers its own slots from 0, so the first slot of every rank goes to expert
    0. Where tokens are cut over ranks, a token may therefore go to other experts than on
    one device, and the first experts get up to one slot more from every rank.
    """
    tokens, experts = scores_TE.shape
    slots = torch.arange(tokens * top_k, device=scores_TE.device)
    expert_ids_TK = (slots % experts).view(tokens, top_k)
    return assert_type(expert_ids_TK, type_of(scores_TE) or {}, index=Index(experts))


def keep_best_groups(scores_TE: Tensor, groups: int, limit: int) -> Tensor:
    """scores placed as t -> the same, -inf outside each token's best groups of experts.

    A group is as good as its two best experts together. Writes along the dim of groups,
    which is never cut.
    """
    grouped = torch.unflatten(scores_TE, 1, (groups, -1))
    group_scores = grouped.topk(2, dim=2, sorted=False).values.sum(2)
    kept = group_scores.topk(limit, dim=1, sorted=False).indices
    is_dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, kept, False)
    return grouped.masked_fill(is_dropped.unsqueeze(2), float("-inf")).flatten(1)
