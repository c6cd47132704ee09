"""Meshes, the current mesh, and two presentations of the same ranks."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from placements import (
    Even,
    Folded,
    I,
    Mesh,
    P,
    Padded,
    PlacementError,
    R,
    Ragged,
    S,
    V,
    ZigZag,
    assert_type,
    current_mesh,
    redistribute,
    reinterpret_mesh,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.testing import run_ranks
from placements.types.axis import AxisType
from placements.types.extents import Extent

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


# dense types -> sparse mesh -> sparse types, and back again
PRESENTED: list[tuple[dict[str, AxisType], dict[str, int], dict[str, AxisType]]] = [
    ({"dp": V, "tp": V}, {"edp": 1, "ep": 8}, {"ep": V}),
    ({"dp": R, "tp": R}, {"edp": 2, "ep": 2, "etp": 2}, {"edp": R, "ep": R, "etp": R}),
    ({"dp": P, "tp": P}, {"ep": 8}, {"ep": P}),
    ({"dp": I, "tp": I}, {"ep": 8}, {"ep": I}),
    ({"dp": S(0), "tp": R}, {"edp": 2, "ep": 1, "etp": 4}, {"edp": S(0), "etp": R}),
    ({"dp": V, "tp": P}, {"ep": 2, "etp": 4}, {"ep": V, "etp": P}),
    ({"dp": S(0), "tp": S(0)}, {"ep": 8}, {"ep": S(0, Even(24))}),
    (
        {"dp": R, "tp": S(0)},
        {"edp": 2, "ep": 2, "etp": 2},
        {"edp": R, "ep": S(0), "etp": S(0)},
    ),
]


@pytest.mark.parametrize(("dense", "sparse_mesh", "sparse"), PRESENTED, ids=str)
def test_a_type_is_presented_on_another_mesh_and_back(
    dense: dict[str, AxisType], sparse_mesh: dict[str, int], sparse: dict[str, AxisType]
) -> None:
    with set_current_mesh(DENSE), typecheck():
        x = assert_type(torch.ones(3, 4), dense)
        y = reinterpret_mesh(x, sparse_mesh)
        assert type_of(y) == sparse
        assert type_of(x) == dense
        assert type_of(reinterpret_mesh(y, DENSE)) == dense


def test_an_uneven_inner_cut_becomes_ragged() -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.ones(2), {"dp": S(0, Even(6)), "tp": S(0, Padded(3))})
        assert type_of(reinterpret_mesh(x, {"ep": 4})) == {"ep": S(0, Ragged(2, 1, 2, 1))}


REFUSED: list[tuple[dict[str, AxisType], dict[str, int], str]] = [
    ({"dp": V, "tp": R}, {"ep": 8}, "two things at once"),
    ({"dp": S(0), "tp": S(1)}, {"ep": 8}, "two things at once"),
    ({"tp": S(0), "dp": S(0)}, {"ep": 8}, "two things at once"),
    ({"dp": R, "tp": S(0, Padded(11))}, {"edp": 2, "ep": 2, "etp": 2}, "unevenly"),
    ({"dp": R, "tp": R}, {"ep": 4}, "not over the same ranks"),
]


@pytest.mark.parametrize(("types", "mesh", "says"), REFUSED, ids=str)
def test_what_cannot_be_presented_is_refused_with_the_reason(
    types: dict[str, AxisType], mesh: dict[str, int], says: str
) -> None:
    with set_current_mesh(DENSE), typecheck():
        x = assert_type(torch.ones(3, 4), types)
        with pytest.raises(PlacementError, match=says) as caught:
            reinterpret_mesh(x, mesh)
        assert caught.value.name == "x"


@pytest.mark.parametrize("inner", [Folded(2, Even(4)), ZigZag(8)], ids=repr)
def test_a_cut_of_several_runs_cannot_be_merged(inner: Extent) -> None:
    with set_current_mesh({"dp": 2, "tp": 2}), typecheck():
        x = assert_type(torch.ones(4), {"dp": S(0), "tp": S(0, inner)})
        with pytest.raises(PlacementError, match="in blocks"):
            reinterpret_mesh(x, {"ep": 4})


def test_tensors_of_two_presentations_do_not_mix() -> None:
    with set_current_mesh(DENSE), typecheck():
        dense = assert_type(torch.ones(3), {"dp": V, "tp": V})
        sparse = reinterpret_mesh(dense, {"ep": 8})
        with pytest.raises(PlacementError, match="different presentations"):
            dense + sparse


def test_with_checking_off_nothing_happens() -> None:
    x = torch.ones(3)
    assert reinterpret_mesh(x, {"ep": 8}) is x
