"""Print and parse, split and join, local rows and global rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placements.testing import strategies
from placements.testing.laws.round_trips import (
    check_joined,
    check_printed,
    check_rows,
    check_scaled,
)
from placements.testing.strategies import PlacedTensor
from placements.types.axis import AxisType, Shard
from placements.types.mesh import Mesh

# Totals of up to 9 rows, and some that twice the ranks often divide: ZigZag.
totals = st.one_of(st.integers(0, 9), st.sampled_from([8, 12, 16, 24]))
bound_extents = st.tuples(totals, st.integers(1, 4)).flatmap(
    lambda p: strategies.extents(total=p[0], ranks=p[1])
)


@given(bound_extents)
def test_local_and_global_rows_are_inverse(extent) -> None:
    check_rows(extent)


@given(bound_extents, st.integers(1, 3))
def test_division_undoes_scaling(extent, factor: int) -> None:
    check_scaled(extent, factor)


@given(
    st.one_of(
        strategies.axis_types(ndim=3), st.builds(Shard, st.integers(0, 2), bound_extents)
    )
)
def test_types_read_as_they_print(t: AxisType) -> None:
    check_printed(t)


@given(
    strategies.meshes().flatmap(
        lambda mesh: strategies.placed_tensors(mesh=mesh, letters="RSPI")
    )
)
def test_what_was_split_joins(placed: PlacedTensor) -> None:
    check_joined(placed)


BAD_CALLS = [
    lambda: strategies.meshes(min_axes=0),
    lambda: strategies.meshes(max_axes=9),
    lambda: strategies.meshes(max_size=0),
    lambda: strategies.shapes(min_dims=2, max_dims=1),
    lambda: strategies.shapes(min_size=-1),
    lambda: strategies.extents(total=-1, ranks=2),
    lambda: strategies.extents(total=3, ranks=0),
    lambda: strategies.axis_types(ndim=-1),
    lambda: strategies.cut_patterns(ranks=0),
    lambda: strategies.unsized_types(mesh=Mesh({"tp": 2}), ndim=-1),
    lambda: strategies.unsized_types(mesh=Mesh({"tp": 2}), ndim=0, letters="S"),
    lambda: strategies.unsized_types(mesh=Mesh({"tp": 2}), ndim=1, letters="X"),
    lambda: strategies.unsized_types(mesh={"tp": 2}, ndim=1),  # type: ignore[arg-type]
    lambda: strategies.likely_types(mesh=2),  # type: ignore[arg-type]
    lambda: strategies.placed_tensors(mesh={"tp": 2}),  # type: ignore[arg-type]
    lambda: strategies.placed_tensors(mesh=Mesh({"tp": 2}), shape=(2, -1)),
]


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_bad_arguments_are_refused(number: int) -> None:
    from hypothesis import find

    with pytest.raises(ValueError):
        find(BAD_CALLS[number](), lambda _: True)
