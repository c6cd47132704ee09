"""Meshes, and the current mesh of a block and of a thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from placements import Mesh, P, R, current_mesh, redistribute, set_current_mesh
from placements.testing import run_ranks

DENSE = {"dp": 2, "cp": 1, "tp": 4}


def test_the_current_mesh_ends_with_its_block() -> None:
    assert current_mesh() is None
    with set_current_mesh({"tp": 2}) as mesh:
        assert current_mesh() is mesh
        with set_current_mesh({"ep": 2}):
            assert current_mesh() == Mesh({"ep": 2})
        assert current_mesh() is mesh
    assert current_mesh() is None


def test_every_thread_has_its_own_current_mesh() -> None:
    with set_current_mesh({"tp": 2}), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_mesh).result() is None


@pytest.mark.parametrize(
    ("sizes", "coordinate", "says"),
    [
        ({"tp": 0}, {}, "must be >= 1"),
        ({"t p": 2}, {}, "must be a name"),
        ({"tp": 2}, {"tp": 2}, "must lie in 0..1"),
    ],
)
def test_bad_meshes_are_refused(
    sizes: dict[str, int], coordinate: dict[str, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        Mesh(sizes, coordinate)


def move_over_sizes_alone() -> None:
    x = torch.ones(2)
    with set_current_mesh({"dp": 1, "tp": 2}):
        assert torch.equal(redistribute(x, "dp", src=P, dst=R), x)  # nothing is to be sent
        with pytest.raises(ValueError, match="sizes alone, so nothing can be sent"):
            redistribute(x, "tp", src=P, dst=R)


def test_among_ranks_sizes_alone_send_nothing() -> None:
    run_ranks({"tp": 2}, move_over_sizes_alone)


def test_something_that_is_no_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="a mesh is a DeviceMesh"):
        set_current_mesh("tp")  # type: ignore[arg-type]
