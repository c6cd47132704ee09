"""Expert parallelism: rows travel to the ranks of their experts over the axis ep.

    dispatch    sort and count the slots by expert  local, dense mesh
                name the ranks (edp, ep, etp)       local, reinterpret_mesh
                tell every rank how many rows       all-to-all of counts over ep, starts
                copy the token of each slot         local, dense mesh; meanwhile
                send the rows                       all-to-all over ep
                regroup them by expert              local, sparse mesh
    collect     the same steps undone, from the last to the first; no counts

Each first exchange is started and waited for later: that of the counts while tokens are
copied, and that of `collect` while the layer does something else.

With etp > 1 all etp ranks exchange the same rows: they are Replicate there going out, and
Partial coming back, since each expert's hidden units are cut over etp.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated

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
from spmd_moe.dims import MD, ND, TD, CountsWG, IndexM
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
from spmd_moe.permute import inverse, regroup, split_sizes
from spmd_moe.route import Routing


@typed
@dataclass(frozen=True)
class ExchangePlan(Plan):
    """How many rows went to and came from each rank, and the order made of them."""

    slots: Slots
    sent: list[int]
    received: list[int]
    inverse_M: IndexM  # from expert order back to sender order


@dataclass(frozen=True)
class AllToAllDispatcher(AbstractDispatcher):
    """The dispatcher where experts are cut over the axis ep of `mesh`, the sparse mesh."""

    layout: Layout
    mesh: Mesh
    score_before_experts: bool = False

    @typed
    def dispatch(
        self, x_TD: Annotated[TD, On("{self.layout.tokens}")], routing: Routing
    ) -> Dispatched:
        """tokens -> rows by expert, Varying on ep.

        Backward: all-to-all of the rows' gradients. Communicates: two all-to-alls over ep.
        """
        slots, before = sort_by_expert(routing), self.score_before_experts
        counts_E = reinterpret_mesh(slots.counts_E, self.mesh)
        counts_WG = counts_E.view(self.mesh.require("ep"), -1)
        with self.on_expert_mesh():
            coming = all_to_all_start(counts_WG, "ep", src=Varying(), dst=Varying())
        rows_ND = fill_slots(x_TD, routing, slots.order_N, self.layout, weigh=before)
        rows_ND = reinterpret_mesh(rows_ND, self.mesh)
        with self.on_expert_mesh():
            return self._exchange(rows_ND, counts_WG, coming.wait(), slots)

    def _exchange(
        self, rows_ND: ND, counts_WG: CountsWG, received_WG: CountsWG, slots: Slots
    ) -> Dispatched:
        place = self.mesh.coordinate["ep"]
        sent, received = split_sizes(counts_WG, received_WG, rows_ND.shape[0], place)
        rows_MD = all_to_all(
            rows_ND, "ep", src=Varying(), dst=Varying(),
            input_split_sizes=sent, output_split_sizes=received,
        )  # fmt: skip
        order_M = regroup(received_WG, rows_MD.shape[0])
        plan = ExchangePlan(slots, sent, received, inverse(order_M))
        return Dispatched(rows_MD.index_select(0, order_M), received_WG.sum(0), plan)

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
        with self.on_expert_mesh():
            rows = all_to_all_start(
                rows_MD.index_select(0, plan.inverse_M), "ep", src=Varying(), dst=Varying(),
                input_split_sizes=plan.received, output_split_sizes=plan.sent,
            )  # fmt: skip
        return Returning(rows, plan)

    @typed
    def collect_finish(
        self, returning: Returning
    ) -> Annotated[ND, On("{self.layout.collected}")]:
        """rows on their way -> rows by slot. Communicates nothing more."""
        assert isinstance(returning.rows, Pending)
        rows_ND = returning.rows.wait()
        rows_ND = reinterpret_mesh(rows_ND, current_mesh() or ONE_DEVICE)
        return rows_ND.index_select(0, returning.plan.slots.inverse_N)
