"""What one rank concludes from the values of all, with ranks that are threads of one process."""

import gc

import torch.distributed as dist

from placements.collectives.objects import judged
from placements.runtime.mesh import current_mesh
from placements.testing import device_mesh, run_ranks

AXES = {"dp": 2, "tp": 2}


def _sums(rounds: int) -> tuple[list[int], bool]:
    device_mesh()
    found = [judged(current_mesh(), dist.get_rank(), _summed) for _ in range(rounds)]
    dist.barrier()
    return found, gc.isenabled()


def _summed(values: dict[int, int]) -> int:
    assert not gc.isenabled()
    assert values == {rank: rank for rank in range(4)}
    return sum(values.values())


def test_garbage_is_looked_for_again_when_all_ranks_have_their_answer() -> None:
    assert gc.isenabled()
    assert run_ranks(AXES, _sums, 25) == [([6] * 25, True)] * 4
    assert gc.isenabled()


def test_garbage_that_was_not_looked_for_before_is_not_looked_for_afterwards() -> None:
    gc.disable()
    try:
        assert run_ranks(AXES, _sums, 3) == [([6] * 3, False)] * 4
    finally:
        gc.enable()
