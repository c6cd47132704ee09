"""A tensor on another mesh over the same ranks: `reinterpret_mesh`."""

import pytest
import torch

from placements import (
    Even,
    Folded,
    I,
    P,
    Padded,
    PlacementError,
    R,
    Ragged,
    S,
    V,
    ZigZag,
    assert_type,
    reinterpret_mesh,
    set_current_mesh,
    type_of,
    typecheck,
)
from placements.types.axis import AxisType
from placements.types.extents import Extent

DENSE = {"dp": 2, "cp": 1, "tp": 4}


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
