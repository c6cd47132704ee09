"""Bring a copy of each token to each of its experts, and the results back to the token.

An `AbstractDispatcher` does so in three steps, and says for each whether it communicates:
`dispatch` (tokens -> rows by expert), `on_expert_mesh` (where the experts run), `collect`
(rows by expert -> rows by slot), which can be started and finished apart. This file has
the one for experts that are here, and `own_rows`, which sees pieces of a global tensor as
this rank's own rows.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from placements import (
    AxisType,
    On,
    Pending,
    Shard,
    Varying,
    reinterpret,
    row_numbers,
    type_of,
    typed,
)
from spmd_moe.dims import MD, ND, TD, CountsE, CountsG, IndexN
from spmd_moe.layouts import Layout
from spmd_moe.permute import count_own, inverse, sort_slots
from spmd_moe.precision import wide_dtype
from spmd_moe.route import Routing


@typed
@dataclass(frozen=True)
class Slots:
    """This rank's slots, sorted by expert."""

    order_N: IndexN
    counts_E: CountsE
    inverse_N: IndexN  # from expert order back to slot order


@dataclass(frozen=True)
class Plan:
    """What `collect` needs to undo `dispatch`."""

    slots: Slots


@typed
@dataclass(frozen=True)
class Dispatched:
    """The rows of the experts held here, expert by expert.

    `counts_list` are the numbers of `counts_G` where the host knows them without asking
    the device.
    """

    rows_MD: MD
    counts_G: CountsG
    plan: Plan
    counts_list: list[int] | None = None


@dataclass(frozen=True)
class Returning:
    """Rows by expert that go back to the ranks of their tokens, or are there."""

    rows: Tensor | Pending
    plan: Plan


class AbstractDispatcher(ABC):
    """What brings tokens to experts and back."""

    @abstractmethod
    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Tokens -> rows, expert by expert."""

    @abstractmethod
    def on_expert_mesh(self) -> AbstractContextManager[object]:
        """Make the mesh of the rows that `dispatch` returns current."""

    def collect(self, rows_MD: Tensor, plan: Plan) -> Tensor:
        """Rows, expert by expert -> rows in the order of the slots."""
        return self.collect_finish(self.collect_start(rows_MD, plan))

    @abstractmethod
    def collect_start(self, rows_MD: Tensor, plan: Plan) -> Returning:
        """Send the rows back; what follows is computed while they are under way."""

    @abstractmethod
    def collect_finish(self, returning: Returning) -> Tensor:
        """Wait for the rows, and put them in the order of the slots."""


def own_rows(x: Tensor) -> Tensor:
    """Shard -> Varying on every axis, from the outermost cut; other types stay.

    Code that sorts rows by data, or sends them to other ranks, works on rows of its own.
    To forget that rows are pieces of a global tensor is always sound. With checking off
    this does nothing.
    """
    for axis, t in _types(x):
        if isinstance(t, Shard):
            x = reinterpret(x, axis, src=t, dst=Varying())
    return x


def pieces_like(x: Tensor, example: Tensor) -> Tensor:
    """Varying -> Shard on every axis on which `example` is cut, from the innermost.

    This is a claim: `combine` makes it of rows that it put back in their tokens' order.
    With checking off this does nothing.
    """
    for axis, t in reversed(_types(example)):
        if isinstance(t, Shard):
            x = reinterpret(x, axis, src=Varying(), dst=t)
    return x


def _types(x: Tensor) -> list[tuple[str, AxisType]]:
    known = type_of(x)
    return [] if known is None else list(known.items())


@typed
def copy_tokens(
    x_TD: Annotated[TD, On("{layout.tokens}")], token_of_slot_N: IndexN, layout: Layout
) -> Annotated[ND, On("{layout.slots}")]:
    """tokens Shard(0) | Replicate -> rows Varying | Replicate: one for every slot."""
    return x_TD.index_select(0, token_of_slot_N)


@typed
def sort_by_expert(routing: Routing) -> Slots:
    """Slots of this rank's own tokens -> their order by expert, and their counts.

    A token may name an expert more than once; each time is a slot of its own.
    """
    expert_ids_TK, experts = own_rows(routing.expert_ids_TK), routing.counts_E.shape[0]
    order_N = sort_slots(expert_ids_TK)
    return Slots(order_N, count_own(expert_ids_TK, experts), inverse(order_N))


@typed
def fill_slots(
    x_TD: TD, routing: Routing, order_N: IndexN, layout: Layout, *, weigh: bool
) -> ND:
    """tokens -> a row for every slot, sorted by expert.

    With `weigh` the rows are multiplied by their gates, in at least float32. Which token a
    slot copies is an index of this rank's own rows of `x_TD` and of no other tensor.
    Backward: a token's gradient is the sum over its slots. Communicates nothing.
    """
    choices = routing.expert_ids_TK.shape[1]
    token_of_slot_N = own_rows(row_numbers(x_TD, 0)).repeat_interleave(choices)[order_N]
    rows_ND = copy_tokens(x_TD, token_of_slot_N, layout)
    if weigh:
        gates_N = own_rows(routing.gates_TK).flatten()[order_N]
        wide = wide_dtype(rows_ND, gates_N)
        rows_ND = (rows_ND.to(wide) * gates_N.unsqueeze(1)).to(x_TD.dtype)
    return rows_ND


@dataclass(frozen=True)
class LocalDispatcher(AbstractDispatcher):
    """The dispatcher where all experts are here, or a part of each: rows change order."""

    layout: Layout
    score_before_experts: bool = False

    @typed
    def dispatch(
        self, x_TD: Annotated[TD, On("{self.layout.tokens}")], routing: Routing
    ) -> Dispatched:
        """tokens -> rows sorted by expert. Communicates nothing."""
        slots, before = sort_by_expert(routing), self.score_before_experts
        rows_ND = fill_slots(x_TD, routing, slots.order_N, self.layout, weigh=before)
        return Dispatched(rows_ND, slots.counts_E, Plan(slots))

    def on_expert_mesh(self) -> AbstractContextManager[object]:
        return nullcontext()

    @typed
    def collect_start(
        self, rows_MD: Annotated[MD, On("{self.layout.computed}")], plan: Plan
    ) -> Returning:
        """rows by expert -> the same, which are there. Communicates nothing."""
        return Returning(rows_MD, plan)

    @typed
    def collect_finish(
        self, returning: Returning
    ) -> Annotated[ND, On("{self.layout.collected}")]:
        """rows by expert -> rows by slot. Communicates nothing."""
        assert isinstance(returning.rows, Tensor)
        return returning.rows.index_select(0, returning.plan.slots.inverse_N)
