"""The layer computes while rows travel: equal to the plain order, and the order itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placements import Pending, all_to_all, as_mesh
from placements.collectives import transport
from placements.testing import run_ranks
from spmd_moe import MoE, Parallel, combine, dispatch_all_to_all
from spmd_moe.layer import _move
from tests.support.moe import CONFIG, Case, build, meshes

PARALLELS = (
    Parallel(dp=2, ep=2),
    Parallel(tp=2, ep=2, sequence_parallel=True),
    Parallel(tp=2, ep=2),
    Parallel(dp=2, tp=2, ep=2, etp=2, sequence_parallel=True),
    Parallel(tp=2, sequence_parallel=True),
)


class Arrived(Pending):
    """What `all_to_all` returned, for code that will wait."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def wait(self) -> Tensor:
        return self._rows


def plain(moe: MoE, x: Tensor, seq_len: int) -> Tensor:
    """The forward of the layer, one stage after the other."""
    at, weigh = moe.layout, not moe.config.score_before_experts
    rows = moe._token_rows(x, seq_len)
    entered_TD = _move(x.flatten(0, -2), at.input, at.entered, rows)
    x_TD = _move(entered_TD, at.entered, at.tokens, rows)
    routing = moe.router(x_TD)
    sent = moe.dispatcher.dispatch(x_TD, routing)
    with moe.dispatcher.on_expert_mesh():
        rows_MD = moe.experts(sent.rows_MD, sent.counts_G, sent.counts_list)
    rows_ND = moe.dispatcher.collect(rows_MD, sent.plan)
    y_TD = combine(rows_ND, routing.gates_TK, at, weigh=weigh)
    y_TD = _move(y_TD, at.combined, at.added, rows)
    assert moe.shared_experts is not None
    shared_TD = _move(entered_TD, at.entered, at.shared_input, rows)
    shared_TD = moe.shared_experts(shared_TD)
    y_TD = y_TD + _move(shared_TD, at.shared_output, at.added, rows)
    return _move(y_TD, at.added, at.output, rows).view_as(x)


def step(case: Case, forward: Any) -> list[Tensor]:
    """The output and all gradients of one step on this rank."""
    with meshes(case.parallel) as (dense, sparse):
        moe = build(case, sparse)
        over_tp, place = moe._sequence(case.seq_len)[1], as_mesh(dense).place
        cut = case.parallel.sequence_parallel
        here = over_tp.sizes[place["tp"]] if cut else over_tp.total
        seed = dist.get_rank() if cut else place["dp"]
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, here, case.config.dim, generator=generator).requires_grad_()
        y = forward(moe, x, case.seq_len)
        (y * y).sum().backward()
    gradients = [p.grad for p in moe.parameters() if p.grad is not None]
    assert x.grad is not None and len(gradients) == len(list(moe.parameters()))
    return [y.detach(), x.grad, *gradients]


@pytest.mark.parametrize("parallel", PARALLELS, ids=str)
@pytest.mark.parametrize("before", [False, True])
def test_values_and_gradients_are_those_of_the_plain_order(
    parallel: Parallel, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, in float32."""
    config = replace(CONFIG, score_before_experts=before)
    case = Case(parallel, config, dtype=torch.float32, checked=False)
    found = run_ranks(
        parallel.dense_mesh(), step, case, lambda moe, x, n: moe(x, seq_len=n)
    )

    def at_once(*args: Any, **kwargs: Any) -> Arrived:
        return Arrived(all_to_all(*args, **kwargs))

    monkeypatch.setattr(dispatch_all_to_all, "all_to_all_start", at_once)
    wanted = run_ranks(parallel.dense_mesh(), step, case, plain)
    for by_layer, by_order in zip(found, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(by_layer, by_order, strict=True))


def test_what_lies_between_start_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, and backward, which meets start and wait in the other order."""
    order: list[tuple[int, str]] = []  # ranks take turns, so each writes down its own

    def note(text: str) -> None:
        order.append((dist.get_rank(), text))

    def noted(owner: Any, name: str, text: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            note(text)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    def program() -> None:
        parallel = Parallel(dp=2, ep=2)
        with meshes(parallel) as (_, sparse):
            moe = build(Case(parallel), sparse)
            assert moe.shared_experts is not None
            moe.shared_experts.register_forward_hook(lambda *_: note("shared"))
            moe.shared_experts.register_full_backward_hook(lambda *_: note("shared back"))
            x = torch.ones(2, 5, 8, dtype=torch.float64, requires_grad=True)
            moe(x, seq_len=5).sum().backward()

    noted(transport, "start_exchange", "start")
    noted(transport, "arrived", "wait")
    noted(dispatch_all_to_all, "fill_slots", "copy")
    run_ranks({"dp": 2}, program)
    forward = ["start", "copy", "wait", "start", "wait", "start", "shared", "wait"]
    backward = ["start", "shared back", "wait", "start", "wait"]
    for rank in (0, 1):
        assert [text for of, text in order if of == rank] == [*forward, *backward]
