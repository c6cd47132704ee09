"""Laws of dispatch and combine, for any routing: no router chooses, no layer around them.

Tokens and weights are small whole numbers and gates are eighths, so that all results are
exact. `check_spmd_case` compares values and the gradients of every input.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from placements import Index, R, S, assert_type, current_mesh, reinterpret_mesh, type_of
from placements.testing import check_spmd_case, device_mesh
from placements.testing.draw.routings import DrawnRouting, routings
from placements.testing.strategies import numbers, seeded, seeds
from placements.types.axis import AxisType
from placements.types.mesh import as_mesh
from spmd_moe import AllToAllDispatcher, LocalDispatcher, Parallel, combine
from spmd_moe.compute.grouped_mm import grouped_mm
from spmd_moe.layouts import Layout, configuration, layout
from spmd_moe.permute import count_experts, inverse, sort_slots
from spmd_moe.route import Routing

D, F = 3, 4
Types = dict[str, AxisType]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The tensors are tiny, and the ranks are threads already."""
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Place:
    """Degrees, and the types of the experts' weights on the dense mesh."""

    parallel: Parallel
    w1_EFD: Types
    w2_EDF: Types

    @property
    def mesh(self) -> dict[str, int]:
        """The axes on which there is more than one rank."""
        sizes = self.parallel.dense_mesh()
        return {axis: n for axis, n in sizes.items() if n > 1} or {"tp": 1}

    @property
    def layout(self) -> Layout:
        return layout(configuration(self.parallel))


# Below the boundaries of the layer C2 is C1 and C3 is C4: these are all that differ.
PLACES = (
    Place(Parallel(), {}, {}),
    Place(Parallel(tp=2, ep=2, sequence_parallel=True), {"tp": S(0)}, {"tp": S(0)}),
    Place(Parallel(tp=3, ep=3, sequence_parallel=True), {"tp": S(0)}, {"tp": S(0)}),
    Place(Parallel(dp=2, ep=2), {"dp": S(0)}, {"dp": S(0)}),
    Place(
        Parallel(dp=2, tp=2, ep=2, sequence_parallel=True),
        {"dp": R, "tp": S(0)},
        {"dp": R, "tp": S(0)},
    ),
    Place(
        Parallel(dp=2, tp=2, ep=4, sequence_parallel=True),
        {"dp": S(0), "tp": S(0)},
        {"dp": S(0), "tp": S(0)},
    ),
    Place(Parallel(tp=2), {"tp": S(1)}, {"tp": S(2)}),
    Place(
        Parallel(dp=2, tp=2, ep=2, etp=2),
        {"dp": S(0), "tp": S(1)},
        {"dp": S(0), "tp": S(2)},
    ),
)


@dataclass(frozen=True)
class Law:
    """A routing, where to run it, and whether gates multiply before the experts."""

    place: Place
    routing: DrawnRouting
    before: bool
    seed: int

    def inputs(self) -> dict[str, Tensor]:
        tokens, experts = self.routing.num_tokens, self.routing.num_experts
        shapes = {
            "x_TD": (tokens, D), "w1_EFD": (experts, F, D), "w2_EDF": (experts, D, F)
        }  # fmt: skip
        drawn = {n: numbers(shape, seeded(self.seed, n)) for n, shape in shapes.items()}
        routed = {
            "gates_TK": self.routing.gates_TK, "expert_ids_TK": self.routing.expert_ids_TK
        }  # fmt: skip
        return {**drawn, **routed}

    def check(self, reference: Callable[..., Tensor], without: Sequence[str] = ()) -> None:
        """The flow on ranks against `reference` on one device, of all inputs but some."""
        at, place = self.place.layout, self.place
        types = {
            "x_TD": at.tokens, "gates_TK": at.routing, "expert_ids_TK": at.expert_ids,
            "w1_EFD": place.w1_EFD, "w2_EDF": place.w2_EDF,
        }  # fmt: skip
        placed = {
            name: (value, {axis: types[name].get(axis, R) for axis in place.mesh})
            for name, value in self.inputs().items()
            if name not in without
        }
        accepted = check_spmd_case(self.run, reference, placed, mesh=place.mesh)
        assert accepted, "the checker refused it"

    def run(self, **inputs: Tensor) -> Tensor:
        """On this rank."""
        return flow(self.place, self.routing.num_experts, self.before, **inputs)


def flow(
    place: Place,
    num_experts: int,
    before: bool,
    *,
    x_TD: Tensor,
    gates_TK: Tensor,
    expert_ids_TK: Tensor,
    w1_EFD: Tensor | None = None,
    w2_EDF: Tensor | None = None,
) -> Tensor:
    """dispatch -> experts w2 w1 x, or none -> collect -> combine, on this rank."""
    at, dispatcher = place.layout, dispatcher_of(place, before)
    known = type_of(expert_ids_TK)
    if known is not None:
        assert_type(expert_ids_TK, known, index=Index(num_experts))
    counts_E = count_experts(expert_ids_TK, num_experts)
    sent = dispatcher.dispatch(x_TD, Routing(gates_TK, expert_ids_TK, counts_E))
    rows_MD = sent.rows_MD
    if w1_EFD is not None and w2_EDF is not None:
        with dispatcher.on_expert_mesh():
            mesh = current_mesh()
            w1_GFD, w2_GDF = (
                w if mesh is None else reinterpret_mesh(w, mesh) for w in (w1_EFD, w2_EDF)
            )
            ends_G = sent.counts_G.cumsum(0, dtype=torch.int32)
            rows_MD = grouped_mm(rows_MD, w1_GFD.mT, ends_G)
            rows_MD = grouped_mm(rows_MD, w2_GDF.mT, ends_G)
    rows_ND = dispatcher.collect(rows_MD, sent.plan)
    return combine(rows_ND, gates_TK, at, weigh=not before)


def dispatcher_of(place: Place, before: bool) -> Any:
    if place.parallel.ep == 1:
        return LocalDispatcher(place.layout, before)
    with torch._C.DisableTorchFunction():  # a mesh made under the checker would be refused
        sparse = as_mesh(device_mesh(place.parallel.sparse_mesh()))
    return AllToAllDispatcher(place.layout, sparse, before)


def by_token(
    x_TD: Tensor, gates_TK: Tensor, expert_ids_TK: Tensor, w1_EFD: Tensor, w2_EDF: Tensor
) -> Tensor:
    """The reference: a loop over tokens and their choices."""
    y_TD = [torch.zeros(0, D, dtype=x_TD.dtype)]
    for x_D, gates_K, ids_K in zip(x_TD, gates_TK, expert_ids_TK.tolist(), strict=True):
        rows = [w2_EDF[e] @ (w1_EFD[e] @ x_D) for e in ids_K]
        y_TD.append((gates_K @ torch.stack(rows)).unsqueeze(0))
    return torch.cat(y_TD)


@st.composite
def laws(draw: st.DrawFn, places: Sequence[Place] = PLACES) -> Law:
    place = draw(st.sampled_from(places))
    ranks = place.parallel.ep
    routing = draw(routings(multiple_of=ranks, max_experts=max(5, 2 * ranks)))
    return Law(place, routing, draw(st.booleans()), draw(seeds()))


@given(routings())
def test_an_order_and_its_inverse_are_the_identity(routing: DrawnRouting) -> None:
    order_N = sort_slots(routing.expert_ids_TK)
    slots_N = torch.arange(routing.num_tokens * routing.top_k)
    assert torch.equal(slots_N[order_N][inverse(order_N)], slots_N)
    assert torch.equal(slots_N[inverse(order_N)][order_N], slots_N)


@given(routings())
def test_counts_sum_to_the_slots(routing: DrawnRouting) -> None:
    counts_E = count_experts(routing.expert_ids_TK, routing.num_experts)
    assert torch.equal(counts_E, routing.counts_E)
    assert int(counts_E.sum()) == routing.num_tokens * routing.top_k


@given(laws())
def test_every_dispatcher_on_any_ranks_equals_the_reference(law: Law) -> None:
    """Values and gradients; so n ranks equal one, too."""
    law.check(by_token)


@given(laws(), st.randoms(use_true_random=False))
def test_a_token_may_name_an_expert_more_than_once(law: Law, random: Any) -> None:
    """Each time is a slot: it is counted, sent, computed and weighed by itself."""
    drawn = law.routing
    experts, shape = range(drawn.num_experts), drawn.expert_ids_TK.shape
    ids = [random.choice(experts) for _ in range(shape.numel())]
    ids_TK = torch.tensor(ids, dtype=torch.int64).view(shape)
    counts_E = count_experts(ids_TK, drawn.num_experts)
    assert counts_E.tolist() == [ids.count(expert) for expert in experts]
    replace(law, routing=replace(drawn, expert_ids_TK=ids_TK)).check(by_token)


@given(laws(PLACES[:2]))
def test_identity_experts_return_x(law: Law) -> None:
    gates_sum_T1 = law.routing.gates_TK.sum(1, keepdim=True)
    assert torch.equal(gates_sum_T1, torch.ones_like(gates_sum_T1))
    # x times one; so written, the reference has the gradient of the gates too
    law.check(lambda x_TD, gates_TK, expert_ids_TK: x_TD * gates_TK.sum(1, keepdim=True),
              without=("w1_EFD", "w2_EDF"))  # fmt: skip


@given(laws(PLACES[:1]), st.randoms(use_true_random=False))
def test_permuting_tokens_permutes_outputs(law: Law, random: Any) -> None:
    tokens = range(law.routing.num_tokens)
    order_T = torch.tensor(random.sample(tokens, len(tokens)), dtype=torch.int64)

    def permuted(x_TD, gates_TK, expert_ids_TK, w1_EFD, w2_EDF) -> Tensor:
        y_TD = law.run(
            x_TD=x_TD[order_T], gates_TK=gates_TK[order_T],
            expert_ids_TK=expert_ids_TK[order_T], w1_EFD=w1_EFD, w2_EDF=w2_EDF,
        )  # fmt: skip
        return y_TD[order_T.argsort()]

    law.check(permuted)


@given(laws(PLACES[:1]), st.randoms(use_true_random=False))
def test_relabelling_experts_changes_nothing(law: Law, random: Any) -> None:
    experts = range(law.routing.num_experts)
    label_E = torch.tensor(random.sample(experts, len(experts)))

    def relabelled(x_TD, gates_TK, expert_ids_TK, w1_EFD, w2_EDF) -> Tensor:
        old_E = label_E.argsort()
        return law.run(
            x_TD=x_TD, gates_TK=gates_TK, expert_ids_TK=label_E[expert_ids_TK],
            w1_EFD=w1_EFD[old_E], w2_EDF=w2_EDF[old_E],
        )  # fmt: skip

    law.check(relabelled)
