"""Simulated ranks: failures, isolation, torch features on top, and speed."""

import gc
import inspect
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from placements.testing import RankFailure, device_mesh, run_ranks
from placements.testing.sim_backend import SimGroup

AXES = {"dp": 2, "tp": 2}
resolve = torch._C._distributed_c10d._resolve_process_group


def failure_of(fn: Callable[[], object], mesh: Any = AXES) -> RankFailure:
    start = time.perf_counter()
    with pytest.raises(RankFailure) as caught:
        run_ranks(mesh, fn)
    assert time.perf_counter() - start < 1
    assert run_ranks(mesh, total) == [10.0] * 4, "the next call must run cleanly"
    return caught.value


def total() -> float:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def line_of(fn: Callable[[], object], text: str) -> str:
    lines, first = inspect.getsourcelines(fn)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"test_ranks.py:{first + number}"


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
}


def test_every_collective_of_the_interface_is_implemented() -> None:
    interface = {
        name
        for base in (dist.ProcessGroup, torch._C._distributed_c10d.Backend)
        for name, member in vars(base).items()
        if callable(member) and not name.startswith("__")
    }
    only_of_backends = {
        "allocate_tensor",
        "eager_connect_single_device",
        "memory_stats",
        "resume",
        "setUsePgForSymmMemRendezvous",
        "shrink",
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


def test_premultiplied_sums_are_refused() -> None:
    def scaled() -> None:
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]

    assert "PREMUL_SUM" in failure_of(scaled).headline


# Failures.


def test_another_collective_fails_on_all_ranks() -> None:
    def program() -> None:
        x = torch.ones(2)
        if dist.get_rank() == 2:
            dist.broadcast(x, 0)
        dist.all_reduce(x)

    failure = failure_of(program)
    assert failure.headline == (
        "different collectives: all_reduce on rank 0, broadcast on rank 2"
    )
    assert failure.rank is None and failure.cause is None
    assert len(failure.pending) == 4
    place = line_of(program, "all_reduce")
    for rank in (0, 1, 3):
        assert failure.pending[rank].startswith(
            "all_reduce(float32[2], op=SUM) on group [0, 1, 2, 3]"
        )
        assert failure.pending[rank].endswith(place)
    assert failure.pending[2].startswith("broadcast(float32[2], root=0)")
    assert failure.pending[2].endswith(line_of(program, "broadcast"))
    assert all(text in str(failure) for text in failure.pending)


def other_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(2 + (rank == 1)))


def other_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(2, dtype=torch.float64 if rank == 1 else None))


def other_reduction(rank: int) -> None:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    dist.all_reduce(torch.ones(2), ops[rank == 1])


def other_root(rank: int) -> None:
    dist.broadcast(torch.ones(2), rank % 2)


def other_strides(rank: int) -> None:
    x = torch.ones(2, 2)
    dist.broadcast(x.t() if rank == 1 else x, 0)


@pytest.mark.parametrize(
    ("program", "word"),
    [
        (other_shape, "shape"),
        (other_dtype, "dtype"),
        (other_reduction, "op"),
        (other_root, "root"),
        (other_strides, "strides"),
    ],
)
def test_calls_that_differ_are_told_apart(program: Any, word: str) -> None:
    failure = failure_of(lambda: program(dist.get_rank()))
    assert failure.headline.startswith(f"ranks 0 and 1: different {word} in")


def test_splits_that_do_not_fit_are_named() -> None:
    def program() -> None:
        sent = [1, 1, 1, 1] if dist.get_rank() else [1, 2, 0, 1]
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [1] * 4, sent)

    failure = failure_of(program)
    assert failure.headline == (
        "rank 0 sends float32[2] to rank 1, which expects float32[1]"
    )
    assert "input_splits=[1, 2, 0, 1], output_splits=[1, 1, 1, 1]" in str(failure)


def test_another_group_fails() -> None:
    def program() -> None:
        mesh = device_mesh()
        axis = "tp" if dist.get_rank() == 0 else "dp"
        dist.all_reduce(torch.ones(1), group=mesh.get_group(axis))
        dist.barrier()

    failure = failure_of(program)
    assert "wait for each other" in failure.headline
    assert "on group [0, 1]" in failure.pending[0]
    assert "on group [0, 2]" in failure.pending[2]
    assert failure.pending[1].startswith("barrier()")


def test_a_rank_that_returned_early_fails() -> None:
    def program() -> None:
        if dist.get_rank() != 3:
            dist.barrier()

    failure = failure_of(program)
    assert failure.headline == "ranks [0, 1, 2] wait, but ranks [3] returned"
    assert failure.pending[3] == "returned"


def test_a_rank_that_raises_is_the_cause() -> None:
    def program() -> None:
        dist.barrier()
        if dist.get_rank() == 1:
            raise LookupError("no such row")
        dist.all_reduce(torch.ones(3))

    failure = failure_of(program)
    assert failure.headline == "rank 1 raised LookupError: no such row"
    assert failure.rank == 1
    assert isinstance(failure.cause, LookupError)
    assert failure.__cause__ is failure.cause
    assert failure.pending[1].endswith(line_of(program, "raise"))
    assert all("all_reduce(float32[3]" in failure.pending[r] for r in (0, 2, 3))


def test_the_same_error_on_all_ranks_names_the_first() -> None:
    def program() -> None:
        raise ValueError("everywhere")

    failure = failure_of(program)
    assert failure.rank == 0
    assert all("ValueError: everywhere" in text for text in failure.pending)


def test_a_failure_in_backward_is_reported() -> None:
    class Reduce(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 1:
                return grad
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad

    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        Reduce.apply(x).sum().backward()  # type: ignore[union-attr]

    failure = failure_of(program)
    assert failure.headline == "ranks [0, 2, 3] wait, but ranks [1] returned"


def test_code_that_catches_exceptions_is_unwound_too() -> None:
    seen: list[int] = []

    def program() -> None:
        try:
            if dist.get_rank() == 3:
                raise OSError("gone")
            dist.barrier()
        except OSError:
            raise
        except Exception:
            seen.append(dist.get_rank())
        finally:
            dist.barrier()

    assert failure_of(program).rank == 3
    assert seen == []


def test_a_call_that_nobody_answers_is_found_at_the_end() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1), async_op=True)

    failure = failure_of(program)
    assert "never met" in failure.headline
    assert failure.pending[0].startswith("returned, without all_reduce(float32[1]")


def test_two_blocking_sends_are_a_deadlock() -> None:
    def program() -> None:
        peer = dist.get_rank() ^ 1
        dist.send(torch.ones(1), peer)
        dist.recv(torch.ones(1), peer)

    failure = failure_of(program)
    assert failure.pending[0].startswith("send(float32[1], to=1, tag=0)")


def test_a_send_of_another_shape_fails() -> None:
    def program() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(2), 1)
        elif dist.get_rank() == 1:
            dist.recv(torch.ones(3), 0)

    failure = failure_of(program)
    assert "rank 0 sends float32[2]" in failure.headline


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "gather"])
def test_tensors_with_gaps_are_refused(name: str) -> None:
    def program() -> None:
        x = torch.ones(4, 2)[::2]
        if name == "all_reduce":
            dist.all_reduce(x)
        elif name == "broadcast":
            dist.broadcast(x, 0)
        else:
            places = [torch.ones(2, 2) for _ in range(4)]
            dist.gather(x, places if dist.get_rank() == 0 else None)

    assert "has gaps" in failure_of(program).headline


def test_a_rank_stuck_outside_collectives_is_given_up() -> None:
    release = threading.Event()

    def program() -> None:
        if dist.get_rank() == 1:
            release.wait(5)
        dist.barrier()

    with pytest.raises(RankFailure, match=r"without any collective") as caught:
        run_ranks(3, program, timeout=0.2)
    release.set()
    assert "runs at" in caught.value.pending[1]
    assert run_ranks(3, dist.get_rank) == [0, 1, 2]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs Unix signals")
def test_an_interrupted_call_leaves_the_pool_usable() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def program() -> None:
        while True:
            dist.barrier()

    run_ranks(3, dist.barrier)
    threads = threading.active_count()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(3, program)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert run_ranks(3, total) == [6.0] * 3
    assert threading.active_count() == threads


def test_collectives_need_the_thread_of_their_rank() -> None:
    def program() -> None:
        errors: list[Exception] = []

        def work() -> None:
            try:
                SimGroup.barrier(group)
            except Exception as error:
                errors.append(error)

        group: Any = dist.group.WORLD
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        raise errors[0]

    assert "a thread of its own" in failure_of(program).headline


@pytest.mark.parametrize(
    ("mesh", "options"), [({}, {}), (0, {}), ({"a": 0}, {}), (2, {"backend": "mpi"})]
)
def test_bad_arguments_are_refused(mesh: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        run_ranks(mesh, total, **options)


def test_ranks_do_not_nest() -> None:
    assert "simulated rank" in failure_of(lambda: run_ranks(2, total)).headline


def test_device_mesh_needs_a_rank_and_the_right_size() -> None:
    with pytest.raises(ValueError, match="outside"):
        device_mesh()
    assert "do not make up" in failure_of(lambda: device_mesh({"x": 3})).headline


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


# What torch builds on collectives.


def test_sub_groups_of_a_mesh_reduce_along_their_axis() -> None:
    def program() -> tuple[float, float]:
        mesh = device_mesh()
        x = torch.tensor([float(dist.get_rank())])
        y = x.clone()
        dist.all_reduce(x, group=mesh.get_group("tp"))
        dist.all_reduce(y, group=mesh["dp"].get_group())
        assert device_mesh() is mesh
        return x.item(), y.item()

    assert run_ranks(AXES, program) == [(1, 2), (1, 4), (5, 2), (5, 4)]


def test_dtensors_shard_unevenly_and_come_back() -> None:
    whole = torch.arange(15.0).reshape(5, 3)

    def program(mine: bool) -> tuple[list[int], bool]:
        init = dist.device_mesh.init_device_mesh
        mesh = init("cpu", (4,)) if mine else device_mesh({"all": 4})
        x = distribute_tensor(whole, mesh, [Shard(0)])
        turned = x.redistribute(placements=[Shard(1)])
        assert torch.equal(turned.full_tensor(), whole)
        y = (x @ x.T).full_tensor()
        return list(x.to_local().shape), torch.equal(y, whole @ whole.T)

    for mine in (False, True, False, True):
        shapes = run_ranks(AXES, program, mine)
        assert shapes == [
            ([2, 3], True),
            ([2, 3], True),
            ([1, 3], True),
            ([0, 3], True),
        ]


def test_dtensors_do_not_share_what_depends_on_the_rank() -> None:
    whole = torch.arange(5.0)

    def program(mine: bool) -> list[float]:
        init = dist.device_mesh.init_device_mesh
        mesh = init("cpu", (2, 2)) if mine else device_mesh()
        x = distribute_tensor(whole, mesh, [Shard(0), Shard(0)]) * 1
        return x.redistribute(placements=[Shard(0), Replicate()]).to_local().tolist()

    for mine in (False, True, True):
        rows = run_ranks(AXES, program, mine)
        assert rows == [[0, 1, 2], [0, 1, 2], [3, 4], [3, 4]]


def test_fsdp2_equals_a_single_device() -> None:
    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()

    x = torch.randn(8, 6, dtype=torch.float64)
    reference = model()
    reference(x).square().mean().backward()

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        sharded = model()
        mesh = device_mesh({"fsdp": 4})
        for layer in (sharded[0], sharded[2]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        sharded(x.chunk(4)[dist.get_rank()]).square().mean().backward()
        grads: list[torch.Tensor] = []
        for parameter in sharded.parameters():
            assert isinstance(parameter.grad, DTensor)
            grads.append(parameter.grad.full_tensor())
        return grads

    for _ in range(2):
        for grads in run_ranks(AXES, program, x):
            for grad, parameter in zip(grads, reference.parameters(), strict=True):
                torch.testing.assert_close(grad, parameter.grad)


def test_ddp_equals_a_single_device() -> None:
    torch.manual_seed(0)
    reference, x = nn.Linear(4, 2).double(), torch.randn(8, 4).double()
    local = nn.Linear(4, 2).double()
    local.load_state_dict(reference.state_dict())
    reference(x).square().mean().backward()

    def program(module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        wrapped = nn.parallel.DistributedDataParallel(module)
        wrapped(x.chunk(2)[dist.get_rank()]).square().mean().backward()
        return module.weight.grad  # type: ignore[return-value]

    for grad in run_ranks(2, program, local, x):
        torch.testing.assert_close(grad, reference.weight.grad)


def test_compiled_functional_collectives_run() -> None:
    def program() -> list[float]:
        group: Any = dist.group.WORLD

        @torch.compile(backend="aot_eager", fullgraph=True)
        def f(x: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(x * 2, "sum", group) + 1

        return f(torch.ones(2)).tolist()

    assert run_ranks(2, program) == [[5, 5], [5, 5]]


@given(st.integers(1, 4), st.lists(st.integers(-9, 9), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_properties_run_on_ranks(size: int, values: list[int]) -> None:
    x = torch.tensor(values)

    def program(x: torch.Tensor) -> list[int]:
        x = x * (dist.get_rank() + 1)
        dist.all_reduce(x)
        return x.tolist()

    expected = (x * (size * (size + 1) // 2)).tolist()
    assert run_ranks(size, program, x) == [expected] * size


# Speed.


def moe_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(8, 8, generator=generator)
    return {"router": router, "experts": torch.randn(8, 8, 8, generator=generator)}


def route(x_TD: torch.Tensor, router_DE: torch.Tensor) -> tuple[Any, ...]:
    gates_TK, ids_TK = (x_TD @ router_DE).softmax(-1).topk(2)
    order_N = ids_TK.flatten().argsort(stable=True)
    counts_E = ids_TK.flatten().bincount(minlength=8)
    return gates_TK.flatten()[order_N, None], order_N // 2, counts_E


def experts(rows_MD: torch.Tensor, counts: list[int], w: torch.Tensor) -> torch.Tensor:
    parts = rows_MD.split(counts)
    return torch.cat([torch.relu(p @ w[i]) for i, p in enumerate(parts)])


def moe_on_ranks(x_TD: torch.Tensor, w: dict[str, torch.Tensor]) -> list[Any]:
    me, group = dist.get_rank(), dist.group.WORLD
    x_TD = x_TD.tensor_split([1, 4, 4])[me].requires_grad_()
    w_local = w["experts"][2 * me : 2 * me + 2].clone().requires_grad_()
    gates, tokens, counts_E = route(x_TD, w["router"])
    arriving = torch.empty_like(counts_E)
    dist.all_to_all_single(arriving, counts_E)
    sent = counts_E.view(4, 2).sum(1).tolist()
    received = arriving.view(4, 2).sum(1).tolist()
    rows = funcol.all_to_all_single_autograd(x_TD[tokens], received, sent, group)
    by_expert = torch.arange(2).repeat(4).repeat_interleave(arriving)
    order = by_expert.argsort(stable=True)
    done = experts(rows[order], arriving.view(4, 2).sum(0).tolist(), w_local)
    back = torch.empty_like(done).index_copy(0, order, done)
    home = funcol.all_to_all_single_autograd(back, sent, received, group)
    out = torch.zeros_like(x_TD).index_add(0, tokens, home * gates)
    out.square().sum().backward()
    return [out.detach(), x_TD.grad, w_local.grad]


def moe_on_one(x_TD: torch.Tensor, w: dict[str, torch.Tensor]) -> list[Any]:
    x_TD = x_TD.clone().requires_grad_()
    w_all = w["experts"].clone().requires_grad_()
    gates, tokens, counts_E = route(x_TD, w["router"])
    done = experts(x_TD[tokens], counts_E.tolist(), w_all)
    out = torch.zeros_like(x_TD).index_add(0, tokens, done * gates)
    out.square().sum().backward()
    return [out.detach(), x_TD.grad, w_all.grad]


def test_a_moe_step_on_four_ranks_is_right_and_fast() -> None:
    generator = torch.Generator().manual_seed(1)
    w, times = moe_weights(), list[float]()
    for _ in range(60):
        x_TD = torch.randn(9, 8, generator=generator)
        start = time.perf_counter()
        pieces = run_ranks(4, moe_on_ranks, x_TD, w)
        expected = moe_on_one(x_TD, w)
        times.append(time.perf_counter() - start)
        for name, parts in enumerate(zip(*pieces, strict=True)):
            torch.testing.assert_close(torch.cat(parts), expected[name])
    typical = sorted(times)[len(times) // 2] * 1e3
    print(f"\nMoE step, 4 simulated ranks and reference: {typical:.1f} ms (median)")
    assert typical < 40
