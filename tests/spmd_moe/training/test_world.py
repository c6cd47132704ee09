"""Which ranks there are, by the environment."""

import pytest

from spmd_moe.training.errors import Unusable
from spmd_moe.training.world import World, first_node, given_world, tasks_for_srun

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "123"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "40012"}  # sbatch alone
STEP = {**BATCH, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "8"}  # by srun
STEP["SLURM_STEP_NODELIST"] = "gpu[003-004,009],cpu1"


def test_the_ranks_of_torchrun() -> None:
    assert given_world(TORCHRUN) == World(3, 4, "n1", 123)
    assert given_world(TORCHRUN, port=7) == World(3, 4, "n1", 7)
    assert given_world({**STEP, **TORCHRUN}) == World(3, 4, "n1", 123)


def test_the_ranks_of_slurm() -> None:
    assert given_world(STEP) == World(1, 8, "gpu003", 20012)
    assert given_world({**STEP, "MASTER_ADDR": "n9"}) == World(1, 8, "n9", 20012)
    assert tasks_for_srun(STEP) == 1


def test_no_job() -> None:
    assert given_world({}) is None
    assert given_world({"RANK": "1"}) is None
    assert given_world(BATCH) is None and tasks_for_srun(BATCH) == 8
    alone = {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert given_world(alone) is None and tasks_for_srun(alone) == 1
    assert tasks_for_srun({}) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"RANK": "x"}, "RANK is 'x' in the environment, not a whole number"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "4"}, "this is rank 4 of 4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
    ],
)
def test_an_environment_that_cannot_be_is_refused(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(Unusable, match=said):
        given_world({**TORCHRUN, **wrong})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("a-b[07,9]", "a-b07"),
        ("a-b,c", "a-b"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
