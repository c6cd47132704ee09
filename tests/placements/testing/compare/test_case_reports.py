"""What goes wrong in practice is reported, in under a second, by a message that names it."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from placements import (
    I,
    Index,
    P,
    R,
    S,
    all_reduce,
    assert_type,
    convert,
    set_current_mesh,
    split,
    type_of,
    verify,
)
from placements.testing import (
    RankFailure,
    check_adjoint,
    check_spmd_case,
    device_mesh,
    run_ranks,
)
from placements.types.axis import TypesLike
from placements.types.mesh import as_mesh
from spmd_moe import AllToAllDispatcher, combine
from spmd_moe.dispatch import Dispatched
from spmd_moe.layouts import layout
from spmd_moe.permute import count_experts, inverse
from spmd_moe.route import Routing

SECONDS = 1.0


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What a first run and a first failure import is not a part of the second allowed."""
    torch.set_num_threads(1)
    with pytest.raises(RankFailure):
        run_ranks({"tp": 2}, a_step, 0)
    check_mlp(enter, leave)
    assert check_tokens(lambda sent: sent)


@pytest.fixture(autouse=True)
def meshes() -> None:
    """After a failure they are made anew, which is collective: ranks would be found there."""
    run_ranks({"tp": 3}, both_meshes)


def both_meshes() -> Any:
    device_mesh()
    return sparse_mesh()


@contextmanager
def reported(kind: type[BaseException]) -> Iterator[list[str]]:
    """Something of that kind is raised, soon; its text, when the block is over.

    The time is that of the processor: others may use the machine.
    """
    texts: list[str] = []
    started = time.process_time()
    with pytest.raises(kind) as caught:
        yield texts
    assert time.process_time() - started < SECONDS
    texts.append(str(caught.value))


# A tensor-parallel MLP, with what goes wrong between its two boundaries.


def enter(x_TD: Tensor) -> Tensor:
    return convert(x_TD, "tp", src=I, dst=R)


def leave(y_TD: Tensor) -> Tensor:
    return all_reduce(y_TD, "tp", src=P, dst=I)


def mlp(
    enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], Tensor]
) -> Callable[..., Tensor]:
    def run(x_TD: Tensor, w_DF: Tensor, v_FD: Tensor) -> Tensor:
        return leave((enter(x_TD) @ w_DF).relu() @ v_FD)

    return run


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


INPUTS: dict[str, tuple[Tensor, TypesLike]] = {
    "x_TD": (drawn(3, 4), {"tp": I}),
    "w_DF": (drawn(4, 6), {"tp": S(1)}),
    "v_FD": (drawn(6, 4), {"tp": S(0)}),
}


def check_mlp(enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], Tensor]) -> None:
    check_adjoint(mlp(enter, leave), INPUTS, {"tp": I}, mesh={"tp": 2})


def test_the_right_mlp_passes() -> None:
    check_mlp(enter, leave)


def test_a_dropped_backward_all_reduce_is_named_by_its_input() -> None:
    with reported(AssertionError) as texts:
        check_mlp(lambda x_TD: x_TD, leave)
    assert texts[0].startswith("the gradient of x_TD is not the adjoint")
    assert "x_TD is {'tp': I}, so its gradient must be {'tp': I}" in texts[0]


class _Enter(torch.autograd.Function):
    """Megatron's copy to the region, as it says; its backward sums `times` times."""

    @staticmethod
    def placement_rule(x: Any, times: int) -> Any:
        return {"tp": R}

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.times = times
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].contiguous().clone()
        for _ in range(ctx.times):
            dist.all_reduce(total, group=device_mesh().get_group("tp"))
        return total, None


def summed(x_TD: Tensor, times: int) -> Tensor:
    entered: Any = _Enter.apply(x_TD, times)
    return entered


def a_step(times: int) -> None:
    rank = dist.get_rank()
    with set_current_mesh(device_mesh()), verify():
        x_TD, w_DF, v_FD = (split(v, t, {"tp": 2})[rank] for v, t in INPUTS.values())
        x_TD = assert_type(x_TD.requires_grad_(), {"tp": I})
        assert_type(w_DF, {"tp": S(1)})
        assert_type(v_FD, {"tp": S(0)})
        y_TD = mlp(partial(summed, times=times), leave)(x_TD, w_DF, v_FD)
        y_TD.sum().backward()


def test_a_dropped_backward_all_reduce_is_named_by_verify() -> None:
    run_ranks({"tp": 2}, a_step, 1)
    with reported(RankFailure) as texts:
        run_ranks({"tp": 2}, a_step, 0)
    assert "the gradient of x_TD is different on ranks 0 and 1 on axis 'tp'" in texts[0]
    assert "assert_type at test_case_reports.py:" in texts[0]
    assert "convert(x_TD, 'tp', src=I, dst=R)" in texts[0]


def test_a_gradient_that_is_reduced_twice_is_named_by_its_input() -> None:
    with reported(AssertionError) as texts:
        check_mlp(lambda x_TD: enter(enter(x_TD)), leave)
    assert texts[0].startswith("the gradient of x_TD is not the adjoint")
    assert "2 times as much" in texts[0]


def test_a_gradient_that_is_reduced_twice_is_named_against_one_device() -> None:
    right, twice = (
        mlp(partial(summed, times=1), leave),
        mlp(partial(summed, times=2), leave),
    )
    reference = mlp(lambda x: x, lambda y: y)
    assert check_spmd_case(right, reference, INPUTS, mesh={"tp": 2})
    with reported(AssertionError) as texts:
        check_spmd_case(twice, reference, INPUTS, mesh={"tp": 2})
    assert texts[0].startswith("the gradient of x_TD is not that of one device")


# Dispatch and combine over three ranks with one expert each, which scales by its number:
# of its six tokens a rank keeps one, sends three to the next and two to the one after.

IDS = [0, 1, 1, 1, 2, 2]


def sparse_mesh() -> Any:
    # A mesh made under the checker would be refused
    with torch._C.DisableTorchFunction():
        return as_mesh(device_mesh({"edp": 1, "ep": dist.get_world_size(), "etp": 1}))


Change = Callable[[Dispatched], Dispatched]


def through_experts(x_TD: Tensor, expert_ids_TK: Tensor, change: Change) -> Tensor:
    """dispatch, what `change` makes of its result, one expert per rank, combine."""
    at, ranks = layout("C1"), dist.get_world_size()
    dispatcher = AllToAllDispatcher(at, sparse_mesh())
    counts_E = count_experts(expert_ids_TK, ranks)
    gates_TK = x_TD[:, :1] * 0 + 1
    sent = dispatcher.dispatch(x_TD, Routing(gates_TK, expert_ids_TK, counts_E))
    sent = change(sent)
    with dispatcher.on_expert_mesh():
        rows_MD = sent.rows_MD * (dist.get_rank() + 1)
    rows_ND = dispatcher.collect(rows_MD, sent.plan)
    return combine(rows_ND, gates_TK, at, weigh=True)


def on_three_ranks(change: Change) -> list[int]:
    rank = dist.get_rank()
    expert_ids_TK = torch.tensor([[(e + rank) % 3] for e in IDS])
    with set_current_mesh(device_mesh()):
        return through_experts(torch.ones(6, 1), expert_ids_TK, change).flatten().tolist()


def test_the_right_dispatch_passes() -> None:
    scales = [[(e + rank) % 3 + 1 for e in IDS] for rank in range(3)]
    assert run_ranks({"tp": 3}, on_three_ranks, lambda sent: sent) == scales


def splits_of_dispatch(sent: Dispatched) -> Dispatched:
    """Rows come back in the sizes in which they went."""
    plan: Any = sent.plan
    exchange = replace(plan.exchange, received=plan.exchange.sent)
    return replace(sent, plan=replace(plan, exchange=exchange))


def test_splits_that_do_not_fit_are_named_with_both_ranks_and_the_line() -> None:
    with reported(RankFailure) as texts:
        run_ranks({"tp": 3}, on_three_ranks, splits_of_dispatch)
    headline, *ranks = texts[0].splitlines()
    assert headline == "rank 1 sends float32[2, 1] to rank 0, which expects float32[3, 1]"
    assert len(ranks) == 3
    for text in ranks:
        assert "all_to_all_single(float32[6, 1], input_splits=[" in text
        assert "on group [0, 1, 2]  at spmd_moe/dispatch_all_to_all.py:" in text


def without_rows(rank: int) -> list[float]:
    """A rank without tokens has nothing to do, it seems."""
    x_TD = torch.ones(0 if rank == 2 else 6, 1)
    if x_TD.shape[0] == 0:
        return []
    expert_ids_TK = torch.tensor([[e] for e in IDS])
    with set_current_mesh(device_mesh()):
        return through_experts(x_TD, expert_ids_TK, lambda sent: sent).flatten().tolist()


def test_a_rank_that_skips_a_collective_is_named_with_what_the_others_wait_for() -> None:
    with reported(RankFailure) as texts:
        run_ranks({"tp": 3}, lambda: without_rows(dist.get_rank()))
    headline, first, second, third = texts[0].splitlines()
    assert headline == "ranks [0, 1] wait, but ranks [2] returned"
    assert third == "  rank 2  returned"
    for text in (first, second):
        assert "all_to_all_single(int64[3, 1]" in text and "on group [0, 1, 2]" in text
        assert "at spmd_moe/paths/agreement.py:" in text


def with_an_expert_too_many(rank: int) -> None:
    expert_ids_TK = torch.tensor([[e + (rank == 1)] for e in IDS])
    with set_current_mesh(device_mesh()):
        through_experts(torch.ones(6, 1), expert_ids_TK, lambda sent: sent)


def test_a_rank_that_raises_is_named_with_its_error_and_line() -> None:
    with reported(RankFailure) as texts:
        run_ranks({"tp": 3}, lambda: with_an_expert_too_many(dist.get_rank()))
    headline, first, second, third = texts[0].splitlines()
    assert headline.startswith("rank 1 raised ValueError: expert_ids_TK has the id 3")
    assert "has the id 3" in second and "at spmd_moe/permute.py:" in second
    for text in (first, third):
        assert "all_to_all_single(int64[3, 1]" in text
        assert "at spmd_moe/paths/agreement.py:" in text


def order_for_inverse(sent: Dispatched) -> Dispatched:
    """Rows that come back are put into expert order once more, not into slot order."""
    plan: Any = sent.plan
    slots = replace(plan.slots, inverse_N=inverse(plan.slots.inverse_N))
    return replace(sent, plan=replace(plan, slots=slots))


def swapped_splits(sent: Dispatched) -> Dispatched:
    """Rows are sent on as in dispatch, instead of back: all sizes fit."""
    plan: Any = sent.plan
    went = plan.exchange
    exchange = replace(went, sent=went.received, received=went.sent)
    return replace(sent, plan=replace(plan, exchange=exchange))


def check_tokens(change: Change) -> bool:
    """Nine tokens, all different, three on each rank."""
    ids_T1 = torch.tensor([[0], [1], [1], [1], [2], [2], [2], [0], [0]])

    def on_ranks(x_TD: Tensor, ids_T1: Tensor) -> Tensor:
        known = type_of(ids_T1)
        assert known is not None
        return through_experts(x_TD, assert_type(ids_T1, known, index=Index(3)), change)

    def on_one_device(x_TD: Tensor, ids_T1: Tensor) -> Tensor:
        return x_TD * (ids_T1 + 1)

    x_TD = torch.arange(1.0, 10.0, dtype=torch.float64).unsqueeze(1)
    inputs: dict[str, tuple[Tensor, TypesLike]] = {
        "x_TD": (x_TD, {"tp": S(0)}), "ids_T1": (ids_T1, {"tp": S(0)})
    }  # fmt: skip
    return check_spmd_case(on_ranks, on_one_device, inputs, mesh={"tp": 3})


def test_right_tokens_pass() -> None:
    assert check_tokens(lambda sent: sent)


@pytest.mark.parametrize(("change", "row"), [(order_for_inverse, 7), (swapped_splits, 5)])
def test_rows_of_other_tokens_are_named_by_row(change: Change, row: int) -> None:
    with reported(AssertionError) as texts:
        check_tokens(change)
    assert texts[0].startswith("result 0 is not that of one device")
    assert f"at index ({row}, 0)" in texts[0]
