"""run_ranks(backend="gloo"): one process a rank, its pool, its failures."""

import faulthandler
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from placements.testing import RankFailure, run_ranks
from tests.support.train_runs import is_running, state_of, wait_until


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
    assert "test_processes.py" in failure.value.pending[1]
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
    run_ranks(2, process_id, backend="gloo")  # so the ranks have imported this file
    start = time.perf_counter()
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, program, backend="gloo", timeout=1.0)
    assert time.perf_counter() - start < 10
    if hasattr(faulthandler, "register"):
        _, first = inspect.getsourcelines(program)
        place = f"did not report, is at tests/placements/testing/ranks/test_processes.py:{first + 2}"
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


def never_ends() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass


LOOPS = """
import sys
from placements.testing import run_ranks
from tests.placements.testing.ranks.test_processes import never_ends, process_id
if __name__ == "__main__":
    print(*run_ranks(2, process_id, backend="gloo", timeout=600), flush=True)
    run_ranks(2, never_ends, backend="gloo", timeout=600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_no_rank_outlives_the_process_that_has_the_pool(tmp_path: Path) -> None:
    program = tmp_path / "loops.py"
    program.write_text(LOOPS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(
        [sys.executable, str(program)], env=environment, stdout=subprocess.PIPE, text=True
    ) as run:
        try:
            assert run.stdout is not None
            ranks = [int(pid) for pid in run.stdout.readline().split()]
            wait_until(lambda: [state_of(pid) for pid in ranks] == ["T", "R"])
        finally:
            run.kill()
    wait_until(lambda: not any(is_running(pid) for pid in ranks))
