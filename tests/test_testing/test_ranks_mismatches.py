"""Simulated ranks: what fails, and how it is told."""

import inspect
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placements.testing import RankFailure, device_mesh, run_ranks
from placements.testing.ranks import failures
from placements.testing.ranks.backend import SimGroup

AXES = {"dp": 2, "tp": 2}


def failure_of(fn: Callable[[], object], mesh: Any = AXES) -> RankFailure:
    start, worked = time.perf_counter(), time.process_time()
    with pytest.raises(RankFailure) as caught:
        run_ranks(mesh, fn)
    assert time.process_time() - worked < 1
    assert time.perf_counter() - start < 20, "the timeout of 60 seconds was waited for"
    assert run_ranks(mesh, total) == [10.0] * 4, "the next call must run cleanly"
    return caught.value


def total() -> float:
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def line_of(fn: Callable[[], object], text: str) -> str:
    lines, first = inspect.getsourcelines(fn)
    number = next(i for i, line in enumerate(lines) if text in line)
    return f"test_ranks_mismatches.py:{first + number}"


def test_premultiplied_sums_are_refused() -> None:
    def scaled() -> None:
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]

    assert "PREMUL_SUM" in failure_of(scaled).headline


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


# Bad calls, refused by every rank that makes them.


def tensors(count: int) -> list[torch.Tensor]:
    return [torch.ones(1) for _ in range(count)]


BAD_CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "all_gather": (
        lambda: dist.all_gather(tensors(3), torch.ones(1)),
        "all_gather expects 4 output tensors, one per rank of its group; got 3",
    ),
    "gather": (
        lambda: dist.gather(torch.ones(1), None if dist.get_rank() else tensors(5)),
        "gather expects 4 output tensors, one per rank of its group; got 5",
    ),
    "scatter": (
        lambda: dist.scatter(torch.ones(1), None if dist.get_rank() else tensors(1)),
        "scatter expects 4 input tensors, one per rank of its group; got 1",
    ),
    "all_to_all": (
        lambda: dist.all_to_all(tensors(4), tensors(2)),
        "all_to_all expects 4 input tensors, one per rank of its group; got 2",
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter(torch.ones(1), tensors(3)),
        "reduce_scatter expects 4 input tensors, one per rank of its group; got 3",
    ),
    "broadcast": (
        lambda: dist.broadcast(torch.ones(1), src=9),
        "broadcast got rank 9 of a group of 4 ranks, [0, 1, 2, 3]",
    ),
    "rows": (
        lambda: dist.reduce_scatter_single(torch.ones(2), torch.ones(7)),
        "reduce_scatter_single cuts dim 0 of float32[7] into 4 equal parts",
    ),
    "splits": (
        lambda: dist.all_to_all_single(torch.ones(4), torch.ones(5), None, [1] * 4),
        "all_to_all_single: splits [1, 1, 1, 1] do not add up to dim 0 of float32[5]",
    ),
    "sparse": (
        lambda: dist.all_reduce(torch.eye(2).to_sparse()),
        "float32[2, 2] is sparse_coo; simulated ranks exchange dense tensors",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_is_refused_by_name(name: str) -> None:
    call, text = BAD_CALLS[name]
    failure = failure_of(call)
    assert failure.rank == 0 and text in failure.headline
    assert "test_ranks_mismatches.py:" in failure.pending[0]


@pytest.mark.parametrize(
    ("mesh", "options", "text"),
    [
        ({"tp": 2.0}, {}, "mesh must be a number of ranks"),
        ({"tp": "2"}, {}, "mesh must be a number of ranks"),
        (None, {}, "mesh must be a number of ranks"),
        (True, {}, "mesh must be a number of ranks"),
        (2, {"timeout": -1}, "timeout must be a positive number of seconds; got -1"),
        (2, {"timeout": True}, "timeout must be a positive number of seconds; got True"),
        (2, {"seed": "x"}, "seed must be an integer; got 'x'"),
    ],
)
def test_bad_arguments_are_explained(mesh: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        run_ranks(mesh, total, **options)


def test_arguments_that_cannot_be_copied_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensors that are leaves \(x.detach\(\)\)"):
        run_ranks(2, torch.sum, torch.ones(2, requires_grad=True) * 2)


# Lines.


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_deprecated_name_is_reported_at_the_line_of_its_caller() -> None:
    def program() -> None:
        if dist.get_rank() != 1:
            dist.all_gather_into_tensor(torch.ones(4), torch.ones(1))

    assert failure_of(program).pending[0].endswith(line_of(program, "into_tensor"))


def test_an_error_in_the_standard_library_is_reported_at_the_line_of_its_caller() -> None:
    def program() -> None:
        inspect.signature(total).bind(1)

    assert failure_of(program).pending[0].endswith(line_of(program, ".bind(1)"))


def test_an_error_without_user_code_still_has_a_line() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, total, "too many")
    assert "placements/testing/ranks/run.py:" in caught.value.pending[0]


@pytest.mark.parametrize(
    ("filename", "mine"),
    [
        (os.path.join(os.path.dirname(sys.prefix), "mine.py"), True),
        ("<stdin>", True),
        (pytest.__file__, False),
        (inspect.__file__, False),
        (torch.__file__, False),
        (failures.__file__, False),
    ],
)
def test_installed_files_are_not_user_code(filename: str, mine: bool) -> None:
    outer = ("/home/me/outer.py", 2)
    found = failures.innermost_line([(filename, 1), outer])
    assert found == ((filename, 1) if mine else outer)
