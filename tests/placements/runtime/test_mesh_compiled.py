"""Compiled code and the current mesh: each call has the mesh that is current in it."""

import asyncio

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from placements import I, P, all_reduce, current_mesh, set_current_mesh
from placements.testing import device_mesh, run_ranks
from tests.support.compiled import traced, whole


def axes(x: Tensor) -> Tensor:
    mesh = current_mesh()
    return x * (0 if mesh is None else len(mesh.sizes))


ONE, TWO = {"dp": 1}, {"dp": 1, "tp": 1}


def test_another_mesh_is_seen_and_the_same_one_traces_nothing() -> None:
    compiled, x = whole(axes), torch.ones(1)
    for mesh, n in ((None, 0), (ONE, 1), (TWO, 2)):
        with set_current_mesh(mesh):
            assert compiled(x) == n
    with traced() as graphs:
        for mesh, n in ((TWO, 2), (ONE, 1), (None, 0)):
            with set_current_mesh(mesh):
                assert compiled(x) == n and compiled(x) == n
    assert graphs == [0]


def test_each_task_of_one_thread_has_its_mesh() -> None:
    compiled = whole(axes)

    async def task(mesh: dict[str, int]) -> list[float]:
        found: list[float] = []
        with set_current_mesh(mesh):
            for _ in range(3):
                found.append(compiled(torch.ones(1)).item())
                await asyncio.sleep(0)
        return found

    async def both() -> list[list[float]]:
        return await asyncio.gather(task(ONE), task(TWO))

    assert asyncio.run(both()) == [[1.0] * 3, [2.0] * 3]


def test_groups_of_the_same_sizes_are_told_apart() -> None:
    def total(x: Tensor) -> Tensor:
        return all_reduce(x * 2, "tp", src=P, dst=I)

    def program() -> list[bool]:
        crossed = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
        compiled, found = whole(total), list[bool]()
        x = torch.tensor([10.0 ** dist.get_rank()])
        for mesh in (device_mesh({"dp": 2, "tp": 2}), crossed) * 2:
            with set_current_mesh(mesh):
                found.append(torch.equal(compiled(x), total(x)))
        return found

    assert run_ranks({"dp": 2, "tp": 2}, program) == [[True] * 4] * 4


def test_a_mesh_that_is_set_inside_of_compiled_code() -> None:
    def function(x: Tensor) -> Tensor:
        with set_current_mesh(ONE):
            x = axes(x + 1)
        return axes(x)

    with set_current_mesh(TWO):
        assert whole(function)(torch.ones(1)) == 4
        assert current_mesh() is not None and len(current_mesh().sizes) == 2  # type: ignore[union-attr]


def test_a_graph_that_breaks_inside_such_a_block() -> None:
    def function(x: Tensor) -> Tensor:
        with set_current_mesh(ONE):
            x = x + 1
            torch._dynamo.graph_break()
            x = axes(x)
        return axes(x)

    with set_current_mesh(TWO):
        assert torch.compile(function, backend="aot_eager")(torch.ones(1)) == 4
        assert axes(torch.ones(1)) == 2
