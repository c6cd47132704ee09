"""The simulator against the truth: the same programs on threads and on gloo.

Values are small integers, exact in every dtype used, so results must be equal to the
last bit whatever the order of the sums.
"""

import faulthandler
import inspect
import os
import threading
import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from placements.testing import RankFailure, device_mesh, run_ranks

RANKS = 4
AXES = {"dp": 2, "tp": 2}


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of small integers that is different on every rank."""
    size = torch.Size(shape).numel()
    return (torch.arange(size) % 7 + 1 + dist.get_rank()).reshape(shape).to(dtype)


def all_reduce(op: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = mine(3, 2, dtype=dtype)
    dist.all_reduce(x, op)
    return x


def all_reduce_transposed() -> torch.Tensor:
    x = mine(2, 3).t()
    dist.all_reduce(x)
    return x


def all_reduce_no_rows() -> torch.Tensor:
    x = mine(0, 3)
    dist.all_reduce(x)
    return x


def all_reduce_bool() -> torch.Tensor:
    x = torch.tensor([dist.get_rank() == 1, False])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def all_reduce_complex() -> torch.Tensor:
    x = mine(2).to(torch.complex64)
    dist.all_reduce(x)
    return x


def all_reduce_scalar_async() -> torch.Tensor:
    x = torch.tensor(float(dist.get_rank()))
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


def all_reduce_coalesced() -> list[torch.Tensor]:
    tensors = [mine(2), mine(3, 1)]
    dist.all_reduce_coalesced(tensors)
    return tensors


def reduce_to_two() -> torch.Tensor | None:
    x = mine(3)
    dist.reduce(x, 2)
    return x if dist.get_rank() == 2 else None


def broadcast_from_one(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = mine(2, 2, dtype=dtype)
    dist.broadcast(x, 1)
    return x


def all_gather(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    x = mine(3, 2, dtype=dtype).t()
    places = [torch.empty(2, 3, dtype=dtype) for _ in range(RANKS)]
    dist.all_gather(places, x)
    return places


def all_gather_coalesced() -> list[list[torch.Tensor]]:
    places = [[torch.empty(2), torch.empty(1)] for _ in range(RANKS)]
    dist.all_gather_coalesced(places, [mine(2), mine(1)])
    return places


def all_gather_single() -> torch.Tensor:
    x = mine(3, 2)
    place = torch.empty(3 * RANKS, 2)
    dist.all_gather_single(place, x)
    return place


def all_gather_single_no_rows() -> torch.Tensor:
    place = torch.empty(0, 2)
    dist.all_gather_single(place, mine(0, 2))
    return place


def all_gather_objects() -> list[Any]:
    objects: list[Any] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": dist.get_rank(), "x": "a" * 9})
    return objects


def broadcast_objects() -> list[Any]:
    objects = [dist.get_rank(), "text"]
    dist.broadcast_object_list(objects, src=3)
    return objects


def reduce_scatter(op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    place = torch.empty(2)
    dist.reduce_scatter(place, [mine(2) + i for i in range(RANKS)], op)
    return place


def reduce_scatter_single(op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    place = torch.empty(2, 3)
    dist.reduce_scatter_single(place, mine(2 * RANKS, 3), op)
    return place


def reduce_scatter_uneven() -> torch.Tensor:
    place = torch.empty(dist.get_rank() + 1)
    dist.reduce_scatter(place, [mine(i + 1) for i in range(RANKS)])
    return place


def polled() -> torch.Tensor:
    x = mine(2)
    work: Any = dist.all_reduce(x, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    return x


def future_of_a_call_that_needs_a_later_one() -> list[torch.Tensor]:
    x, y = mine(1), mine(1)
    if dist.get_rank() == 0:
        work: Any = dist.all_reduce(x, async_op=True)
        doubled = work.get_future().then(lambda done: done.value()[0] * 2)
        for rank in range(1, RANKS):
            dist.send(y, rank)
        return [doubled.wait(), x]
    dist.recv(y, 0)
    dist.all_reduce(x)
    return [x, y]


def keys_of_the_store() -> tuple[bytes, bool]:
    store: Any = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == RANKS - 1:
        store.set("greeting", "hello")
    store.wait(["greeting"])
    dist.barrier()
    return store.get("greeting"), store.check([f"key {dist.get_rank()}"])


def monitored_barriers() -> int:
    dist.monitored_barrier()
    return dist.get_rank()


def all_to_all() -> list[torch.Tensor]:
    places = [torch.empty(2) for _ in range(RANKS)]
    dist.all_to_all(places, [mine(2) * 10 + i for i in range(RANKS)])
    return places


def counts(sender: int, receiver: int) -> int:
    return (3 * sender + 2 * receiver) % 4


def splits() -> tuple[list[int], list[int]]:
    me = dist.get_rank()
    sent = [counts(me, r) for r in range(RANKS)]
    return sent, [counts(r, me) for r in range(RANKS)]


def all_to_all_single_even() -> torch.Tensor:
    place = torch.empty(RANKS, 2)
    dist.all_to_all_single(place, mine(RANKS, 2))
    return place


def all_to_all_single_uneven(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    sent, received = splits()
    place = torch.empty(sum(received), 2, dtype=dtype)
    x = mine(sum(sent), 2, dtype=dtype)
    dist.all_to_all_single(place, x, received, sent)
    return place


def all_to_all_single_no_rows() -> torch.Tensor:
    place = torch.empty(0, 2)
    dist.all_to_all_single(place, mine(0, 2), [0] * RANKS, [0] * RANKS)
    return place


def gather_to_one() -> list[torch.Tensor] | None:
    places = [torch.empty(2) for _ in range(RANKS)] if dist.get_rank() == 1 else None
    dist.gather(mine(2), places, dst=1)
    return places


def scatter_from_three() -> torch.Tensor:
    me = dist.get_rank()
    place = torch.empty(2)
    parts = [mine(2) * i for i in range(RANKS)] if me == 3 else None
    dist.scatter(place, parts, src=3)
    return place


def barriers() -> int:
    dist.barrier()
    dist.barrier(device_mesh().get_group("tp"))
    return dist.get_rank()


def ring_of_sends() -> torch.Tensor:
    me = dist.get_rank()
    place = torch.empty(3)
    receiving = dist.irecv(place, (me - 1) % RANKS)
    sending = dist.isend(mine(3), (me + 1) % RANKS)
    assert receiving is not None and sending is not None
    receiving.wait()
    sending.wait()
    return place


def batch_of_sends() -> torch.Tensor:
    me = dist.get_rank()
    place = torch.empty(3)
    ops = [
        dist.P2POp(dist.isend, mine(3), me ^ 1),
        dist.P2POp(dist.irecv, place, me ^ 1),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return place


def receive_from_anyone() -> tuple[torch.Tensor, int | None] | None:
    if dist.get_rank() == 2:
        dist.send(torch.tensor([5.0]), 0)
    if dist.get_rank() != 0:
        return None
    place = torch.empty(1)
    return place, dist.recv(place)


def tagged_sends_out_of_order() -> list[torch.Tensor]:
    me, places = dist.get_rank(), [torch.empty(1), torch.empty(1)]
    if me == 0:
        works = [dist.isend(torch.tensor([float(t)]), 1, tag=t) for t in (1, 2)]
    elif me == 1:
        works = [dist.irecv(places[i], 0, tag=t) for i, t in enumerate((2, 1))]
    else:
        return []
    for work in works:
        assert work is not None
        work.wait()
    return places if me == 1 else []


def sub_groups() -> list[torch.Tensor]:
    mesh = device_mesh()
    x, y = mine(2), mine(2)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    dist.all_reduce(y, group=mesh.get_group("dp"))
    other = device_mesh({"edp": 1, "ep": 4})
    z = mine(1)
    dist.all_reduce(z, group=other["ep"].get_group())
    return [x, y, z]


def groups_in_another_order() -> list[torch.Tensor]:
    mesh = device_mesh()
    x, y = mine(2), mine(3)
    pairs = [(x, mesh.get_group("tp")), (y, mesh.get_group("dp"))]
    if dist.get_rank() % 2:
        pairs.reverse()
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in pairs]
    for work in works:
        assert work is not None
        work.wait()
    return [x, y]


def group_of_three() -> torch.Tensor:
    group = dist.new_group([0, 1, 3])
    x = mine(2)
    if dist.get_rank() != 2:
        dist.all_reduce(x, group=group)
    return x


def differentiated(fn: Any, *shape: int, dtype: Any = torch.float32) -> list[Any]:
    x = mine(*shape, dtype=dtype).requires_grad_()
    y = fn(x)
    weight = mine(*y.shape, dtype=dtype)
    (y * weight).sum().backward()
    return [y.detach() + 0, x.grad]


def exchanged(x: torch.Tensor) -> torch.Tensor:
    sent, received = splits()
    return funcol.all_to_all_single_autograd(x, received, sent, dist.group.WORLD)


def grad_all_to_all(dtype: torch.dtype = torch.float32) -> list[Any]:
    return differentiated(exchanged, sum(splits()[0]), 2, dtype=dtype)


def grad_all_to_all_strided() -> list[Any]:
    rows = sum(splits()[0])
    return differentiated(lambda x: exchanged(x.t()), 2, rows)


def grad_all_to_all_no_rows() -> list[Any]:
    none = [0] * RANKS
    return differentiated(
        lambda x: funcol.all_to_all_single_autograd(x, none, none, dist.group.WORLD),
        0,
        3,
    )


def grad_all_gather() -> list[Any]:
    group = device_mesh().get_group("tp")
    return differentiated(
        lambda x: funcol.all_gather_tensor_autograd(x.t(), 1, group), 3, 2
    )


def grad_reduce_scatter() -> list[Any]:
    return differentiated(
        lambda x: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD),
        2 * RANKS,
        3,
    )


def grad_checkpointed() -> list[Any]:
    def inner(x: torch.Tensor) -> Any:
        return checkpoint(lambda y: exchanged(y).square(), x, use_reentrant=False)

    return differentiated(inner, sum(splits()[0]), 2)


def functional_all_reduce(op: str) -> torch.Tensor:
    return funcol.all_reduce(mine(2, 2).t(), op, dist.group.WORLD) + 0


def functional_all_gather() -> torch.Tensor:
    return funcol.all_gather_tensor(mine(2, 3).t(), 1, dist.group.WORLD) + 0


def functional_coalesced() -> list[torch.Tensor]:
    world: Any = dist.group.WORLD
    gathered = funcol.all_gather_into_tensor_coalesced([mine(2), mine(1, 2)], world)
    scattered = funcol.reduce_scatter_tensor_coalesced(
        [mine(4), mine(8)], "sum", [0, 0], world
    )
    reduced = funcol.all_reduce_coalesced([mine(2), mine(3)], "sum", world)
    return [t + 0 for t in (*gathered, *scattered, *reduced)]


def functional_broadcast() -> torch.Tensor:
    return funcol.broadcast(mine(2), 2, dist.group.WORLD) + 0


def functional_permute() -> torch.Tensor:
    return funcol.permute_tensor(mine(2), [1, 2, 3, 0], dist.group.WORLD) + 0


def dtensor_uneven() -> list[torch.Tensor]:
    mesh = device_mesh({"all": RANKS})
    whole = (torch.arange(15.0) % 7).reshape(5, 3)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    y = x.redistribute(placements=[Shard(1)])
    return [x.to_local(), y.to_local(), y.full_tensor()]


def dtensor_matmul() -> list[Any]:
    mesh = device_mesh()
    a = distribute_tensor(torch.eye(6) * 2, mesh, [Replicate(), Shard(0)])
    w = distribute_tensor(mine(6, 4) * 0 + 3, mesh, [Shard(1), Replicate()])
    w.requires_grad_()
    y = a @ w
    assert isinstance(y, DTensor)
    y.sum().backward()
    assert isinstance(w.grad, DTensor)
    return [y.full_tensor().detach(), w.grad.full_tensor()]


def random_numbers() -> list[torch.Tensor]:
    first = torch.randn(2)
    dist.all_reduce(mine(1))
    return [first, torch.nn.functional.dropout(torch.ones(8)), torch.randn(1)]


OP = dist.ReduceOp
FLOAT_OPS = [OP.SUM, OP.AVG, OP.PRODUCT, OP.MIN, OP.MAX]
INT_OPS = [OP.SUM, OP.PRODUCT, OP.MIN, OP.MAX, OP.BAND, OP.BOR, OP.BXOR]
BF16 = torch.bfloat16

PROGRAMS = [
    *(partial(all_reduce, op) for op in FLOAT_OPS),
    *(partial(all_reduce, op, torch.int64) for op in INT_OPS),
    *(partial(all_reduce, op, BF16) for op in (OP.SUM, OP.MAX)),
    *(partial(reduce_scatter, op) for op in (OP.SUM, OP.MAX)),
    *(partial(reduce_scatter_single, op) for op in (OP.SUM, OP.AVG, OP.MIN)),
    *(partial(fn, BF16) for fn in (broadcast_from_one, all_gather)),
    *(partial(fn, BF16) for fn in (all_to_all_single_uneven, grad_all_to_all)),
    *(partial(functional_all_reduce, op) for op in ("sum", "avg", "max")),
    all_reduce_transposed,
    all_reduce_no_rows,
    all_reduce_bool,
    all_reduce_complex,
    all_reduce_scalar_async,
    all_reduce_coalesced,
    reduce_to_two,
    broadcast_from_one,
    all_gather,
    all_gather_coalesced,
    all_gather_single,
    all_gather_single_no_rows,
    all_gather_objects,
    broadcast_objects,
    reduce_scatter_uneven,
    polled,
    future_of_a_call_that_needs_a_later_one,
    keys_of_the_store,
    monitored_barriers,
    all_to_all,
    all_to_all_single_even,
    all_to_all_single_uneven,
    all_to_all_single_no_rows,
    gather_to_one,
    scatter_from_three,
    barriers,
    ring_of_sends,
    batch_of_sends,
    receive_from_anyone,
    tagged_sends_out_of_order,
    sub_groups,
    groups_in_another_order,
    group_of_three,
    grad_all_to_all,
    grad_all_to_all_strided,
    grad_all_to_all_no_rows,
    grad_all_gather,
    grad_reduce_scatter,
    grad_checkpointed,
    functional_all_gather,
    functional_coalesced,
    functional_broadcast,
    functional_permute,
    dtensor_uneven,
    dtensor_matmul,
    random_numbers,
]


def name_of(program: Any) -> str:
    if not isinstance(program, partial):
        return program.__name__
    words = [getattr(a, "name", str(a)) for a in program.args]
    return "-".join([program.func.__name__, *words])


def without_warnings(program: Any) -> Any:
    with warnings.catch_warnings():
        # Deprecated by torch 2.13, still part of the interface.
        warnings.simplefilter("ignore", FutureWarning)
        return program()


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_threads_and_gloo_processes_agree(program: Any) -> None:
    simulated = run_ranks(AXES, without_warnings, program)
    real = run_ranks(AXES, without_warnings, program, backend="gloo")
    assert len(simulated) == len(real) == RANKS
    for one, other in zip(simulated, real, strict=True):
        leaves, tree = pytree.tree_flatten(one)
        others, other_tree = pytree.tree_flatten(other)
        assert tree == other_tree
        for a, b in zip(leaves, others, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b, rtol=0, atol=0)
            else:
                assert a == b


def doubled(x: torch.Tensor, module: torch.nn.Module) -> Any:
    x += dist.get_rank()
    return module(x).detach(), x, torch.get_num_threads()


def test_gloo_arguments_and_results_keep_their_tensors() -> None:
    x, module = torch.arange(3.0), torch.nn.Linear(3, 2)
    results = run_ranks(2, doubled, x, module, backend="gloo")
    for rank, (y, seen, num_threads) in enumerate(results):
        torch.testing.assert_close(seen, x + rank)
        torch.testing.assert_close(y, module(x + rank).detach())
        assert num_threads == 1


def process_id() -> int:
    return os.getpid()


def test_one_pool_serves_many_calls() -> None:
    first = run_ranks(2, process_id, backend="gloo")
    start = time.perf_counter()
    for _ in range(20):
        assert run_ranks(2, process_id, backend="gloo") == first
    assert (time.perf_counter() - start) / 20 < 0.1
    assert len(set(first)) == 2 and os.getpid() not in first


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the second rank")
    dist.barrier()


class TwoArgumentsError(Exception):
    """An exception that pickle cannot rebuild."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def raise_strangely() -> None:
    raise TwoArgumentsError("a", "b")


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def sleep_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(100)


def return_early_on_one() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def test_a_gloo_rank_that_raises_is_reported_at_once_with_its_exception() -> None:
    start = time.perf_counter()
    with pytest.raises(RankFailure, match="rank 1 raised KeyError") as failure:
        run_ranks(2, raise_on_one, backend="gloo")
    assert time.perf_counter() - start < 20
    assert failure.value.rank == 1
    assert isinstance(failure.value.__cause__, KeyError)
    assert "test_backend_gloo.py" in failure.value.pending[1]
    assert run_ranks(2, dist.get_rank, backend="gloo") == [0, 1]


def test_an_exception_that_cannot_travel_is_described() -> None:
    with pytest.raises(RankFailure, match="TwoArgumentsError: a b"):
        run_ranks(2, raise_strangely, backend="gloo")


def test_a_gloo_rank_that_dies_is_reported_at_once() -> None:
    with pytest.raises(RankFailure, match="rank 1 died with exit code 7"):
        run_ranks(2, die_on_one, backend="gloo")
    assert run_ranks(2, dist.get_rank, backend="gloo") == [0, 1]


@pytest.mark.parametrize("program", [sleep_on_one, return_early_on_one])
def test_a_gloo_rank_that_hangs_is_reported_in_time(program: Any) -> None:
    run_ranks(2, dist.get_rank, backend="gloo")
    start = time.perf_counter()
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, program, backend="gloo", timeout=1.0)
    assert time.perf_counter() - start < 10
    if hasattr(faulthandler, "register"):
        _, first = inspect.getsourcelines(program)
        place = f"did not report, is at tests/placements/testing/ranks/test_backend_gloo.py:{first + 2}"
        assert place in str(caught.value)
    assert run_ranks(2, dist.get_rank, backend="gloo") == [0, 1]


def leave_the_world() -> None:
    dist.destroy_process_group()


def test_a_gloo_task_may_destroy_its_world() -> None:
    first = run_ranks(2, process_id, backend="gloo")
    assert run_ranks(2, leave_the_world, backend="gloo") == [None, None]
    assert run_ranks(2, dist.get_rank, backend="gloo") == [0, 1]
    assert run_ranks(2, process_id, backend="gloo") == first


def test_functions_without_an_import_name_are_refused() -> None:
    local = 3
    with pytest.raises(ValueError, match="module level"):
        run_ranks(2, lambda: local, backend="gloo")
    with pytest.raises(ValueError, match="module level"):
        run_ranks(2, print, threading.Lock(), backend="gloo")


def result_without_pickle() -> Any:
    return lambda: 0


def test_results_that_cannot_travel_are_refused() -> None:
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(2, result_without_pickle, backend="gloo")
