"""A DeviceMesh is made, sliced and read inside the block, on simulated and real ranks."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from placements import R, set_current_mesh, type_of, typecheck
from placements.testing import device_mesh, run_ranks

AXES = {"dp": 2, "tp": 2}


def meshes() -> list[Any]:
    """The numbers of ranks in several meshes, as this rank has them, and its place."""
    names = ("a", "b")
    with set_current_mesh(device_mesh()), typecheck():
        made = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        of_tensor = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
        of_lists = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
        assert type_of(made.mesh) == {"dp": R, "tp": R}
        assert type_of(made.mesh.flatten() + 1) == {"dp": R, "tp": R}
        assert type_of(made["a"].mesh) is None
        # A place on the mesh is a number of the axes along which it differs.
        ones = torch.ones(2)
        places = [type_of(ones * made.get_local_rank(name)) for name in names]
        assert [str(place) for place in places] == ["{dp:V, tp:R}", "{dp:R, tp:V}"]
        return [
            made.mesh.tolist(),
            of_tensor.mesh.tolist(),
            of_lists.mesh.tolist(),
            made["a"].mesh.tolist(),
            made["b"].get_local_rank() + 0,
            made["a", "b"].size(),
        ]


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_meshes_inside_the_block(backend: Any) -> None:
    whole = [[0, 1], [2, 3]]
    assert run_ranks(AXES, meshes, backend=backend) == [
        [whole, whole, whole, [tp, tp + 2], tp, 4] for _ in range(2) for tp in range(2)
    ]
