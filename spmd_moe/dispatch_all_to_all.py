"""Expert parallelism: rows travel to the ranks of their experts over the axis ep.

    dispatch    sort the slots by expert            local, dense mesh
                name the ranks (edp, ep, etp)       local, reinterpret_mesh
                agree on how many rows go where     `agreement.py`: all-to-all of counts
                send the rows                       `equal_split.py`: all-to-all over ep
                regroup them by expert              `regroup.py`: local, sparse mesh
    collect     the same steps undone, from the last to the first; no counts

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
    Varying,
    all_to_all,
    current_mesh,
    reinterpret_mesh,
    set_current_mesh,
    typed,
)
from spmd_moe.config import MoEConfig, Parallel
from spmd_moe.dims import MD, ND, TD, IndexN
from spmd_moe.dispatch import (
    AbstractDispatcher,
    Dispatched,
    Plan,
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

    inverse_N: IndexN
    exchange: Exchange
    regrouping: AbstractRegrouping


@dataclass(frozen=True)
class AllToAllDispatcher(AbstractDispatcher):
    """The dispatcher where experts are cut over the axis ep of `mesh`, the sparse mesh.

    `agreement` is how ranks learn how many rows come; `regrouper` how rows are put in the
    order of the experts. What a dispatcher of its own kind replaces is one of these, or all
    of `AbstractDispatcher`.
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
        agreed = self._agree(slots)
        rows = reinterpret_mesh(self._rows_to_send(x_TD, routing, slots, agreed), self.mesh)
        with self.on_expert_mesh():
            rows_MD = self._sent(rows, agreed.exchange, out=True)
            regrouping = self.regrouper(agreed, rows_MD.shape[0])
            plan = ExchangePlan(slots.inverse_N, agreed.exchange, regrouping)
            by_expert_MD = regrouping.to_experts(rows_MD)
            known = regrouping.counts_list
            return Dispatched(by_expert_MD, regrouping.counts_G, plan, known)

    def _agree(self, slots: Slots) -> Agreed:
        counts_E, ranks = (
            reinterpret_mesh(slots.own.counts_E, self.mesh),
            self.mesh.require("ep"),
        )
        with self.on_expert_mesh():
            counts_WG = counts_E.view(ranks, -1)
            rows = slots.order_N.shape[0]
            return self.agreement.agree(counts_WG, rows, slots.own.turns, self.mesh)

    def _rows_to_send(
        self, x_TD: Tensor, routing: Routing, slots: Slots, agreed: Agreed
    ) -> Tensor:
        """Return the rows by rank and expert, padded to equal splits if it was agreed."""
        exchange, before = agreed.exchange, self.score_before_experts
        if agreed.turns is not None and goes_direct(
            agreed.turns, self.mesh.require("ep"), weigh=before
        ):
            return direct_rows(own_rows(x_TD), agreed.turns.choices, exchange)
        rows_ND = fill_slots(x_TD, routing, slots, self.layout, weigh=before)
        return exchange.before(rows_ND, out=True)

    def _sent(self, rows: Tensor, exchange: Exchange, *, out: bool) -> Tensor:
        """Send what `Exchange.before` gave, and return what came, without padding."""
        sends, receives = exchange.sizes(out=out)
        came = all_to_all(
            rows, "ep", src=Varying(), dst=Varying(),
            input_split_sizes=sends, output_split_sizes=receives,
        )  # fmt: skip
        return exchange.after(came, out=out)

    def on_expert_mesh(self) -> AbstractContextManager[object]:
        return set_current_mesh(self.mesh)

    @typed
    def collect(
        self, rows_MD: Annotated[MD, On("{self.layout.computed}")], plan: Plan
    ) -> Annotated[ND, On("{self.layout.collected}")]:
        """rows by expert -> rows by slot, back at their tokens' ranks.

        Backward: all-to-all. Communicates: one all-to-all over ep.
        """
        assert isinstance(plan, ExchangePlan), plan
        with self.on_expert_mesh():
            rows = plan.exchange.before(plan.regrouping.to_senders(rows_MD), out=False)
            rows_ND = self._sent(rows, plan.exchange, out=False)
        rows_ND = reinterpret_mesh(rows_ND, current_mesh() or ONE_DEVICE)
        return rows_ND.index_select(0, plan.inverse_N)


def agreement_of(config: MoEConfig, parallel: Parallel) -> AbstractAgreement:
    """Return the way in which ranks agree that the configuration asks for."""
    padding = parallel.max_padding
    told = ByExchange() if padding is None else ByGather(padding)
    if config.round_robin and parallel.equal_tokens:
        return ByTurns(told, padding)
    return told
