"""The simulator against gloo: autograd, functional collectives, DTensor, random numbers."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from placements.testing import device_mesh
from tests.support.rank_programs import RANKS, assert_backends_agree, mine, name_of, splits


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


PROGRAMS = [
    partial(grad_all_to_all, torch.bfloat16),
    *(partial(functional_all_reduce, op) for op in ("sum", "avg", "max")),
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


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_threads_and_gloo_processes_agree(program: Any) -> None:
    assert_backends_agree(program)
