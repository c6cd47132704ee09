"""Expert parallelism: rows travel to the ranks of their experts over the axis ep.

    dispatch    sort the slots by expert            local, dense mesh
                name the ranks (edp, ep, etp)       local, reinterpret_mesh
                agree on how many rows go where     paths/agreement.py: all-to-all of counts
                copy the token of each slot         local, dense mesh; meanwhile
                send the rows                       paths/equal_split.py: all-to-all over ep
                regroup them by expert              paths/regroup.py: local, sparse mesh
    collect     the same steps undone, from the last to the first; no counts

The first exchange of `dispatch` and that of `collect` are started and waited for later: the
tokens are copied while the counts travel, and the layer does something else while the rows
come back.

With etp > 1 all etp ranks exchange the same rows: they are Replicate there going out, and
Partial coming back, since each expert's hidden units are cut over etp.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Annotated

from torch import Tensor

from placements import (
    Mesh,
    On,
    Pending,
    Varying,
    all_to_all,
    all_to_all_start,
    current_mesh,
    reinterpret_mesh,
    set_current_mesh,
    typed,
)
from spmd_moe.config import MoEConfig, Parallel
from spmd_moe.dims import MD, ND, TD
from spmd_moe.dispatch import (
    AbstractDispatcher,
    Dispatched,
    Plan,
    Returning,
    Slots,
    fill_slots,
    sort_by_expert,
)
from spmd_moe.layouts import Layout
from spmd_moe.meshes import ONE_DEVICE
from spmd_moe.paths.agreement import (
    AbstractAgreement,
    Agreed,
    ByExchange,
    ByGather,
    ByTurns,
)
from spmd_moe.paths.direct_send import direct_rows, goes_direct
from spmd_moe.paths.equal_split import Exchange
from spmd_moe.paths.own import own_rows
from spmd_moe.paths.regroup import AbstractRegrouping, Regrouper, regrouped
from spmd_moe.route import Routing


@typed
@dataclass(frozen=True)
class ExchangePlan(Plan):
    """How the rows travelled, and the order that was made of them."""

    slots: Slots
    exchange: Exchange
    regrouping: AbstractRegrouping


@dataclass(frozen=True)
class AllToAllDispatcher(AbstractDispatcher):
    """The dispatcher where experts are cut over the axis ep of `mesh`, the sparse mesh.

    `agreement` is how ranks learn how many rows come; `regrouper` how rows are put in the
    order of the experts. A dispatcher of another kind replaces one of these, or is an
    `AbstractDispatcher` of its own.
    """

    layout: Layout
    mesh: Mesh
    score_before_experts: bool = False
    agreement: AbstractAgreement = field(default_factory=ByExchange)
    regrouper: Regrouper = regrouped

    @typed
    def dispatch(
        self, x_TD: Annotated[TD, On("{self.layout.tokens}")], routing: Routing
    ) -> Dispatched:
        """tokens -> rows by expert, Varying on ep.

        Backward: all-to-all of the rows' gradients. Communicates: two all-to-alls over ep,
        or what the agreement says instead of the first.
        """
        slots = sort_by_expert(routing)
        rows, agreed = self._rows_to_send(x_TD, routing, slots)
        rows, exchange = reinterpret_mesh(rows, self.mesh), agreed.exchange
        with self.on_expert_mesh():
            sends, receives = exchange.sizes(out=True)
            came = all_to_all(
                rows, "ep", src=Varying(), dst=Varying(),
                input_split_sizes=sends, output_split_sizes=receives,
            )  # fmt: skip
            rows_MD = exchange.after(came, out=True)
            regrouping = self.regrouper(agreed, rows_MD.shape[0])
            plan = ExchangePlan(slots, exchange, regrouping)
            by_expert_MD = regrouping.to_experts(rows_MD)
            known = regrouping.counts_list
            return Dispatched(by_expert_MD, regrouping.counts_G, plan, known)

    def _rows_to_send(
        self, x_TD: Tensor, routing: Routing, slots: Slots
    ) -> tuple[Tensor, Agreed]:
        """Return the rows by rank and expert, padded if that is agreed, and the agreement.

        Tokens are copied while the ranks agree.
        """
        turns, before = slots.own.turns, self.score_before_experts
        counts_E = reinterpret_mesh(slots.own.counts_E, self.mesh)
        ranks, num_rows = self.mesh.require("ep"), slots.order_N.shape[0]
        with self.on_expert_mesh():
            counts_WG = counts_E.view(ranks, -1)
            agreeing = self.agreement.start(counts_WG, num_rows, turns, self.mesh)
        is_known = self.agreement.is_known(turns)
        if is_known and turns is not None and goes_direct(turns, ranks, weigh=before):
            agreed = agreeing()
            return direct_rows(own_rows(x_TD), turns.choices, agreed.exchange), agreed
        rows_ND = fill_slots(x_TD, routing, slots, self.layout, weigh=before)
        with self.on_expert_mesh():
            agreed = agreeing()
        return agreed.exchange.before(rows_ND, out=True), agreed

    def on_expert_mesh(self) -> AbstractContextManager[object]:
        return set_current_mesh(self.mesh)

    @typed
    def collect_start(
        self, rows_MD: Annotated[MD, On("{self.layout.computed}")], plan: Plan
    ) -> Returning:
        """rows by expert -> on their way to their tokens' ranks.

        Backward: all-to-all. Communicates: one all-to-all over ep.
        """
        assert isinstance(plan, ExchangePlan), plan
        sends, receives = plan.exchange.sizes(out=False)
        with self.on_expert_mesh():
            rows = plan.exchange.before(plan.regrouping.to_senders(rows_MD), out=False)
            coming = all_to_all_start(
                rows, "ep", src=Varying(), dst=Varying(),
                input_split_sizes=sends, output_split_sizes=receives,
            )  # fmt: skip
        return Returning(coming, plan)

    @typed
    def arrived(self, returning: Returning) -> Annotated[ND, On("{self.layout.collected}")]:
        """rows on their way -> rows, without padding. Communicates nothing more."""
        plan = returning.plan
        assert isinstance(plan, ExchangePlan), plan
        assert isinstance(returning.rows, Pending)
        with self.on_expert_mesh():
            rows_ND = plan.exchange.after(returning.rows.wait(), out=False)
        return reinterpret_mesh(rows_ND, current_mesh() or ONE_DEVICE)


def agreement_of(config: MoEConfig, parallel: Parallel) -> AbstractAgreement:
    """Return the way in which ranks agree that the configuration asks for."""
    padding = parallel.max_padding
    told = ByExchange() if padding is None else ByGather(padding)
    if config.round_robin and parallel.equal_tokens:
        return ByTurns(told, padding)
    return told
