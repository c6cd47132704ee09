"""Simulated ranks: the interface, and what a call leaves untouched."""

import gc
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils._python_dispatch import TorchDispatchMode

from placements import current_mesh, set_current_mesh
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.testing.ranks.backend import SimGroup

AXES = {"dp": 2, "tp": 2}
resolve = torch._C._distributed_c10d._resolve_process_group


def total() -> float:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


# The interface: a method that is not ours would block or fail in C++.

NOT_COLLECTIVE = {
    "abort",
    "bound_device_id",
    "boxed",
    "get_group_store",
    "group_desc",
    "merge_remote_group",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "split_group",
    "unbox",
    "use_pg_for_symm_mem_rendezvous",
    "_backend_id",
    "_device_types",
    "_enable_collectives_timing",
    "_get_backend",
    "_get_backend_name",
    "_get_sequence_number_for_group",
    "_has_hooks",
    "_id",
    "_pybind11_conduit_v1_",
    "_register_backend",
    "_register_on_completion_hook",
    "_set_default_backend",
    "_set_group_desc",
    "_set_group_name",
    "_set_sequence_number_for_group",
    "_wait_for_pending_works",
    # Since torch 2.15: hooks, and groups that are made anew.
    "_add_ephemeral_timeout",
    "get_backend",
    "get_reconfigure_handle",
    "new_window",
    "reconfigure",
    "register_abort_hook",
    "register_post_hook",
    "register_pre_hook",
    "unregister_abort_hook",
    "unregister_post_hook",
    "unregister_pre_hook",
}


def test_every_collective_of_the_interface_is_implemented() -> None:
    interface = {
        name
        for base in (dist.ProcessGroup, torch._C._distributed_c10d.Backend)
        for name, member in vars(base).items()
        if callable(member) and not name.startswith("__")
    }
    only_of_backends = {
        "_end_time_estimate",
        "_set_group_uid",
        "_start_time_estimate",
        "allocate_tensor",
        "allreduce_sparse",
        "eager_connect_single_device",
        "get_error",
        "memory_stats",
        "merge",
        "resume",
        "setUsePgForSymmMemRendezvous",
        "shrink",
        "split",
        "suspend",
        "supports_tensor_alloc",
    }
    kinds = {name for name, kind in vars(dist.ProcessGroup).items() if _is_enum(kind)}
    wanted = interface - NOT_COLLECTIVE - only_of_backends - kinds
    wanted -= {"BackendType", "Options"}
    assert "allreduce" in wanted and "recv_anysource" in wanted
    missing = {name for name in wanted if name not in vars(SimGroup)}
    assert not missing


def _is_enum(value: object) -> bool:
    return type(value).__name__ == "BackendType"


def test_the_default_group_is_the_object_that_python_calls() -> None:
    def backend() -> object:
        assert isinstance(dist.group.WORLD, SimGroup)
        return dist.get_backend(), dist.group.WORLD.name()

    assert run_ranks(2, backend) == [("sim", "sim")] * 2


# Isolation.


def test_arguments_are_copied_for_each_rank() -> None:
    x = torch.zeros(2, requires_grad=True)

    def grad(x: torch.Tensor) -> torch.Tensor | None:
        (x * (dist.get_rank() + 1)).sum().backward()
        return x.grad

    grads = run_ranks(2, grad, x)
    assert [g.tolist() for g in grads if g is not None] == [[1, 1], [2, 2]]
    assert x.grad is None


def test_each_rank_has_its_own_random_numbers() -> None:
    def draw() -> list[float]:
        numbers = [torch.rand(()).item()]
        dist.barrier()
        return [*numbers, torch.rand(()).item()]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = run_ranks(2, draw)
    assert first == second
    assert run_ranks(2, draw, seed=1)[0] != first
    assert torch.equal(torch.get_rng_state(), before)


def test_the_process_keeps_its_own_torch_distributed() -> None:
    assert not dist.is_initialized()
    hook = sys.excepthook
    run_ranks(AXES, total)
    assert sys.excepthook is hook
    assert not dist.is_initialized()
    with tempfile.NamedTemporaryFile() as file:
        store = dist.FileStore(file.name, 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            for _ in range(2):
                assert run_ranks(AXES, total) == [10.0] * 4
                assert dist.get_backend() == "gloo" and dist.get_world_size() == 1
                reduced = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
                assert (reduced + 0).tolist() == [1, 1]
                name = dist.group.WORLD.group_name  # type: ignore[union-attr]
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(resolve, name).result()
        finally:
            dist.destroy_process_group()
    assert run_ranks(AXES, total) == [10.0] * 4


def test_ranks_leave_the_filters_of_warnings_alone() -> None:
    def program() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.barrier()
            dist.barrier()  # the first rank leaves first, unlike nested contexts

    before = list(warnings.filters)
    run_ranks(2, program)
    assert warnings.filters == before


def test_groups_made_by_some_ranks_only_do_not_spoil_the_next_call() -> None:
    def uneven() -> None:
        if dist.get_rank() == 1:
            dist.new_group([1], use_local_synchronization=False)

    def even() -> float:
        x = torch.ones(1)
        dist.all_reduce(x, group=dist.new_group([0, 1]))
        return x.item()

    run_ranks(2, uneven)
    assert run_ranks(2, even) == [2, 2]


def test_ranks_may_destroy_their_world() -> None:
    assert run_ranks(2, dist.destroy_process_group) == [None, None]
    assert run_ranks(2, dist.get_world_size) == [2, 2]


def test_modes_do_not_see_the_inside_of_a_collective() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []

    def program() -> list[float]:
        x = torch.ones(2)
        with Seen():
            dist.all_reduce(x)
        return x.tolist()

    assert run_ranks(2, program) == [[2, 2], [2, 2]]
    assert not [name for name in names if "copy" in name or "add" in name]


def test_a_collective_does_not_bump_the_version() -> None:
    def program() -> int:
        x = torch.ones(2)
        dist.all_reduce(x)
        return x._version

    assert run_ranks(2, program) == [0, 0]


def test_many_calls_leak_neither_threads_nor_groups() -> None:
    def program() -> tuple[int, float]:
        group = dist.new_group([0, 1])
        if dist.get_rank() == 3:
            raise ValueError
        device_mesh({"a": 4})
        if dist.get_rank() < 2:
            dist.barrier(group)
        return len(dist.distributed_c10d._world.pg_map), total()

    def kept() -> tuple[int, float]:
        group = dist.new_group([0, 1, 2, 3])
        device_mesh()
        dist.barrier(group)
        return len(dist.distributed_c10d._world.pg_map), total()

    def groups() -> int:
        gc.collect()
        return sum(type(o) is SimGroup for o in gc.get_objects())

    run_ranks(AXES, kept)
    threads, before = threading.active_count(), groups()  # other tests may hold some
    for _ in range(100):
        with pytest.raises(RankFailure):
            run_ranks(AXES, program)
        # The world, the group of this call, and one per axis of the mesh.
        for _ in range(2):
            assert run_ranks(AXES, kept) == [(4, 10.0)] * 4
    assert threading.active_count() == threads
    assert groups() - before < 60


IMPORTED_IN_A_RANK = """
import torch
from placements.testing import run_ranks

def program():
    import torch.distributed.nn.functional as functional
    return functional.all_reduce(torch.ones(1)).item()

assert run_ranks(2, program) == [2, 2]
assert run_ranks(3, program) == [3, 3, 3]
"""


def test_an_import_inside_a_rank_does_not_keep_its_group() -> None:
    command = [sys.executable, "-W", "ignore", "-c", IMPORTED_IN_A_RANK]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_keys_of_the_store_do_not_outlive_a_call() -> None:
    def seen() -> bool:
        store: Any = dist.distributed_c10d._get_default_store()
        before = store.check(["a"])
        store.set("a", "1")
        dist.barrier()
        return before

    assert run_ranks(2, seen)[0] is False
    assert run_ranks(2, seen)[0] is False


def test_ranks_that_wait_for_a_key_nobody_sets_are_a_deadlock() -> None:
    def program() -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        store.wait(["never"])

    with pytest.raises(RankFailure, match="wait for each other") as caught:
        run_ranks(2, program)
    assert "store.wait(" in caught.value.pending[0]
    assert "test_run.py:" in caught.value.pending[0]


def test_ranks_that_poll_for_ever_run_into_the_timeout() -> None:
    def program() -> None:
        work: Any = None
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
        while work is not None and not work.is_completed():
            time.sleep(0.01)

    with pytest.raises(RankFailure, match="without any collective"):
        run_ranks(3, program, timeout=0.5)
    assert run_ranks(3, total) == [6.0] * 3


def leave_a_mesh_set() -> str:
    before = repr(current_mesh())
    set_current_mesh({"left": 2})  # without `with`, so that nothing ends it
    return before


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_what_a_program_leaves_set_ends_with_it(backend: str) -> None:
    first = run_ranks({"tp": 2}, leave_a_mesh_set, backend=backend)
    assert run_ranks({"tp": 2}, leave_a_mesh_set, backend=backend) == first
    assert all("left" not in mesh for mesh in first)
