"""Which ranks there are, by the environment; ports."""

import socket

import pytest

from spmd_moe.training.launch import HOST, check_port, free_port
from spmd_moe.training.world import World, first_node, given_world


def test_the_ranks_of_torchrun() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n1", "MASTER_PORT": "123"}
    assert given_world(env) == World(3, 4, "n1", 123)
    assert given_world(env, port=7) == World(3, 4, "n1", 7)


def test_the_ranks_of_slurm() -> None:
    env = {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "40012"}
    env["SLURM_STEP_NODELIST"] = "gpu[003-004,009],cpu1"
    assert given_world(env) == World(1, 8, "gpu003", 20012)
    assert given_world({**env, "MASTER_ADDR": "n9"}) == World(1, 8, "n9", 20012)


def test_no_job() -> None:
    assert given_world({}) is None
    assert given_world({"RANK": "1"}) is None


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


def test_a_port_that_is_taken_is_refused() -> None:
    check_port(free_port())
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        with pytest.raises(ValueError, match="cannot be used"):
            check_port(taken.getsockname()[1])
    with pytest.raises(ValueError, match="cannot be used"):
        check_port(70000)
