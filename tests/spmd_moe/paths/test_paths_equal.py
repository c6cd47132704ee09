"""Each fast path gives what the plain path gives: values and gradients, bit for bit.

The layer itself runs on ranks, in whole numbers of float64 where sums are in another order,
with the same weights and tokens, once plainly and once by fast paths. The recorder shows
which paths ran, the ledger what was sent.
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placements import assert_type, ledger, split, typecheck, verify
from placements.testing import run_ranks
from spmd_moe import LocalDispatcher, MoE, MoEConfig, Parallel
from spmd_moe.dispatch import sort_by_expert
from spmd_moe.paths.recorder import Recorder, ran, recording
from spmd_moe.paths.regroup import PadGroups
from tests.support.moe import Case, build, meshes

CONFIG = MoEConfig(dim=4, hidden_dim=2, num_experts=4, top_k=2, num_shared_experts=1)
TURNS = replace(CONFIG, round_robin=True)
EP2 = Parallel(tp=2, ep=2, sequence_parallel=True)
FAST = {"equal_tokens": True, "max_padding": math.inf}


@dataclass
class Ran:
    values: dict[str, Tensor]
    paths: dict[str, int]
    sent: list[tuple[str, str, int, bool]]  # axis, kind, bytes, backward?


def once(case: Case, multiple: int = 0, checked: bool = False) -> Ran:
    """One step on this rank; `multiple` pads groups as quantised dispatch does."""
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        if multiple:
            moe.dispatcher = replace(moe.dispatcher, regrouper=PadGroups(multiple))  # type: ignore[type-var]
        x, weights = (
            split(t, moe.layout.input, dense)[dist.get_rank()] for t in case.tensors()
        )
        x = x.clone().requires_grad_()
        with recording() as recorder, ledger() as record:
            y = moe(x, seq_len=case.seq_len)
            (y * weights).sum().backward()
        assert x.grad is not None
        values = {"y": y.detach(), "d_x": x.grad}
        for name, parameter in moe.named_parameters():
            assert parameter.grad is not None, name
            values[name] = parameter.grad
        sent = [(e.axis, e.kind, e.nbytes, e.backward) for e in record.entries]
        if checked:
            for mode in (typecheck(), verify()):
                with mode:
                    again = x.detach().clone()
                    assert_type(again, moe.input_types(case.seq_len))
                    again = moe(again, seq_len=case.seq_len)
                torch.testing.assert_close(again, y)
        return Ran(values, recorder.counts(), sent)


def both(plain: Case, fast: Case, multiple: int = 0) -> tuple[Ran, Ran]:
    return once(plain), once(fast, multiple)


def compared(plain: Case, fast: Case, multiple: int = 0, exact: bool = True) -> list[Ran]:
    """Run both on all ranks; equal bit for bit, or to the last digits of float64."""
    mesh = plain.parallel.dense_mesh()
    results = run_ranks(mesh, both, plain, fast, multiple)
    for slow, quick in results:
        assert slow.values.keys() == quick.values.keys()
        for name, value in slow.values.items():
            if exact:
                assert torch.equal(value, quick.values[name]), name
            else:
                torch.testing.assert_close(quick.values[name], value, msg=name)
    return [quick for _, quick in results]


def cases(
    config: MoEConfig,
    parallel: Parallel,
    dtype: torch.dtype = torch.float64,
    seq_len: int = 8,
    favoured: tuple[int, ...] = (),
    **how: Any,
) -> tuple[Case, Case]:
    """The plain case and the fast one, which differ in `how` the ranks are used."""
    case = Case(parallel, config, 1, seq_len, favoured, dtype=dtype)
    return case, replace(case, parallel=replace(parallel, **how))


KNOWN = {"round_robin_dispatch": 1, "cached_order": 1}
DIRECT = {**KNOWN, "direct_send": 1}
VIEW = {"equal_count_permute": 1, "equal_count_unpermute": 1}
PLACES = (
    EP2,
    Parallel(tp=2, ep=2),
    Parallel(dp=2, ep=2),
    Parallel(dp=2, tp=2, ep=4, sequence_parallel=True),
    Parallel(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
)


def over_ep(quick: Ran) -> list[tuple[str, int]]:
    """What a forward sends over ep: kinds and bytes."""
    return [
        (kind, n) for axis, kind, n, backward in quick.sent if axis == "ep" and not backward
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parallel", PLACES)
def test_round_robin_is_known_without_communication(
    parallel: Parallel, dtype: torch.dtype
) -> None:
    config = replace(TURNS, top_k=3)  # not the experts of a rank: nothing goes direct
    plain, fast = cases(config, parallel, dtype, equal_tokens=True)
    for quick in compared(plain, fast):
        assert KNOWN.items() <= quick.paths.items() and "direct_send" not in quick.paths
        kinds = Counter(kind for axis, kind, _, _ in quick.sent if axis == "ep")
        assert kinds == {"all-to-all": 4}  # rows out and back, forward and backward


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("parallel", PLACES)
def test_rows_go_direct_where_choices_are_the_experts_of_a_rank(
    parallel: Parallel, before: bool
) -> None:
    """Bit for bit: in this layer two choices are added in either order."""
    config = replace(TURNS, top_k=4 // parallel.ep, score_before_experts=before)
    plain, fast = cases(config, parallel, equal_tokens=True)
    for quick in compared(plain, fast):
        assert ("direct_send" in quick.paths) is not before
        # Where all counts are equal the rows are regrouped by a view.
        assert VIEW.items() <= quick.paths.items()


@pytest.mark.parametrize("seq_len", [2, 6, 8])
@pytest.mark.parametrize("parallel", [EP2, Parallel(dp=2, ep=2)])
def test_round_robin_is_padded_only_where_splits_differ(
    parallel: Parallel, seq_len: int
) -> None:
    """Bytes on the wire are those of the equal splits, known before anything is sent."""
    config = replace(TURNS, num_experts=6, top_k=1)
    plain, fast = cases(config, parallel, seq_len=seq_len, **FAST)
    tokens = seq_len // (2 if parallel.tp == 2 else 1)
    sent = [len([j for j in range(tokens) if j % 6 // 3 == rank]) for rank in range(2)]
    for rank, quick in enumerate(compared(plain, fast)):
        size = max(sent)
        row = config.dim * 8
        assert over_ep(quick) == [("all-to-all", 2 * size * row)] * 2
        assert quick.paths["equal_split_dispatch_padding"] == 2 * size - sum(sent)
        padding = 2 * size - 2 * sent[rank]
        assert quick.paths["equal_split_combine_padding"] == padding


@pytest.mark.parametrize("limit", [None, 0.1, math.inf])
@pytest.mark.parametrize("favoured", [(), (0, 1)])
@pytest.mark.parametrize("parallel", PLACES)
def test_learned_routing_is_padded_up_to_a_limit_that_ranks_share(
    parallel: Parallel, favoured: tuple[int, ...], limit: float | None
) -> None:
    plain, fast = cases(CONFIG, parallel, max_padding=limit, favoured=favoured, seq_len=5)
    found = compared(plain, fast)
    padded = {"equal_split_dispatch" in quick.paths for quick in found}
    assert padded <= {limit == math.inf} or limit == 0.1
    for quick in found:
        assert "round_robin_dispatch" not in quick.paths
        first, *rows = over_ep(quick)
        assert first == ("all-to-all" if limit is None else "all-gather", 4 * 8)
        if limit == math.inf:
            assert rows[0] == rows[1]


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("config", [CONFIG, TURNS])
def test_padded_groups_give_the_same(config: MoEConfig, multiple: int) -> None:
    plain, fast = cases(config, EP2, equal_tokens=True)
    for quick in compared(plain, fast, multiple, exact=False):
        assert quick.paths["padded_permute"] == quick.paths["padded_unpermute"] == 1
        assert not VIEW.keys() & quick.paths.keys()


@pytest.mark.parametrize("how", [{}, {"equal_tokens": True}, FAST])
def test_a_layer_without_tokens_gives_every_gradient(how: dict[str, Any]) -> None:
    for config in (TURNS, CONFIG):
        plain, fast = cases(config, EP2, **how)
        plain, fast = (replace(case, seq_len=0) for case in (plain, fast))
        for quick in compared(plain, fast):
            assert all(not value.any() for value in quick.values.values())


def test_one_rank_uses_the_local_dispatcher() -> None:
    moe = MoE(TURNS, Parallel(equal_tokens=True, max_padding=math.inf))
    assert isinstance(moe.dispatcher, LocalDispatcher)
    seen: list[list[int] | None] = []
    moe.experts.register_forward_pre_hook(lambda _, args: seen.append(args[2]))
    with recording() as recorder:
        moe(torch.randn(5, 4), seq_len=5)
    assert recorder.counts() == {"cached_order": 1} and seen == [[3, 3, 2, 2]]


@pytest.mark.parametrize(
    ("config", "parallel", "how"),
    [
        (CONFIG, EP2, {"max_padding": math.inf}),
        (TURNS, EP2, FAST),
        (replace(TURNS, top_k=3), PLACES[4], {"equal_tokens": True}),
        pytest.param(CONFIG, PLACES[3], FAST, marks=pytest.mark.deep),
        pytest.param(TURNS, PLACES[3], FAST, marks=pytest.mark.deep),
    ],
)
def test_under_typecheck_and_verify(
    config: MoEConfig, parallel: Parallel, how: dict[str, Any]
) -> None:
    """What ranks decide by their own counts is no branch that `verify()` warns of."""
    _, fast = cases(config, parallel, **how)
    run_ranks(parallel.dense_mesh(), once, fast, 0, True)


@dataclass
class Order(Recorder):
    """Names in the order in which they came."""

    names: list[str] = field(default_factory=list[str])

    def add(self, name: str, amount: int) -> None:
        self.names.append(name)


def events(case: Case) -> list[str]:
    with meshes(case.parallel) as (dense, sparse), recording(Order()) as order:
        moe = build(case, sparse)
        assert moe.shared_experts is not None
        moe.shared_experts.register_forward_hook(lambda *_: ran("shared experts"))
        x = split(case.tensors()[0], moe.layout.input, dense)[dist.get_rank()]
        moe(x, seq_len=case.seq_len)
    assert isinstance(order, Order)
    return order.names


def test_padding_is_cut_off_after_the_shared_experts_ran() -> None:
    """The fork touched the rows that come back before it ran the shared experts."""
    _, fast = cases(CONFIG, EP2, max_padding=math.inf)
    for names in run_ranks({"tp": 2}, events, fast):
        last = names.index("equal_split_combine")
        assert names.index("equal_split_dispatch") < names.index("shared experts") < last


def gloo() -> list[tuple[Ran, Ran]]:
    chosen = [cases(TURNS, EP2, **FAST), cases(CONFIG, EP2, max_padding=math.inf)]
    return [both(plain, fast) for plain, fast in chosen]


def test_on_processes() -> None:
    """Over gloo: the same values as the plain path there, and what the ledger said."""
    for results in run_ranks({"tp": 2}, gloo, backend="gloo"):
        for slow, quick in results:
            for name, value in slow.values.items():
                assert torch.equal(value, quick.values[name]), name
        turns, learned = (quick for _, quick in results)
        assert DIRECT.items() <= turns.paths.items()
        assert "equal_split_dispatch" in learned.paths


def test_counts_of_tokens_that_were_split_since_are_made_anew() -> None:
    """seeds.md 5.1.1: counts of unsplit tokens are discarded after a split."""
    router = MoE(TURNS).router
    routing = router(torch.randn(6, 4))
    own = routing.own
    assert own is not None and own.slots == 12 and own.turns is not None
    piece = replace(
        routing, gates_TK=routing.gates_TK[3:], expert_ids_TK=routing.expert_ids_TK[3:]
    )
    slots = sort_by_expert(piece)
    assert slots.own.counts_E.tolist() == [1, 1, 2, 2] and slots.own.turns is None
    assert sort_by_expert(routing).own is own
