"""The argument meshes= of what reduces and clips gradients."""

from typing import Any

import pytest

from placements import (
    R,
    S,
    clip_grad_norm_,
    gradient_axes,
    reduce_gradients,
    set_current_mesh,
)
from placements.testing import RankFailure, device_mesh, run_ranks
from tests.support.reduced_gradients import Scale, backward


def one_mesh_for_meshes(given: Any) -> Any:
    mesh, scale = device_mesh(), Scale({"dp": R})
    with set_current_mesh(mesh):
        backward(scale, {"dp": S(0)})
    meshes = {"mesh": mesh, "sizes": {"dp": 2}}.get(given, given)
    axes = gradient_axes(scale, meshes=meshes)
    if given == "mesh":
        reduce_gradients(scale, meshes=meshes)
        clip_grad_norm_(scale, 1e9, meshes=meshes)
    return axes


@pytest.mark.parametrize("given", ["mesh", "sizes"])
def test_meshes_may_be_one_mesh(given: str) -> None:
    assert run_ranks({"dp": 2}, one_mesh_for_meshes, given) == [{"w": ("dp",)}] * 2


def test_meshes_that_are_no_meshes_are_refused() -> None:
    with pytest.raises(RankFailure, match="meshes= takes a mesh"):
        run_ranks({"dp": 2}, one_mesh_for_meshes, "dp")
    with pytest.raises(RankFailure, match="meshes= takes a mesh"):
        run_ranks({"dp": 2}, one_mesh_for_meshes, 3)
