"""The simulator against the truth: the same programs on threads and on gloo.

Values are small integers, exact in every dtype used, so results must be equal to the
last bit whatever the order of the sums.
"""

import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placements.testing import device_mesh
from tests.support.rank_programs import RANKS, assert_backends_agree, mine, name_of, splits


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
    partial(all_to_all_single_uneven, BF16),
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
]


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_threads_and_gloo_processes_agree(program: Any) -> None:
    assert_backends_agree(program)
