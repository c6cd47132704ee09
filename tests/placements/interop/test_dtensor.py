"""Our types as DTensor placements and back."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed.tensor as dt
from hypothesis import given, settings
from hypothesis import strategies as st

from placements import Even, Folded, Padded, Ragged, split
from placements.interop.dtensor import (
    axis_type_of,
    from_placements,
    placement_of,
    to_placements,
)
from placements.runtime.declared import declared
from placements.testing import device_mesh, run_ranks
from placements.types.axis import AxisType, I, P, R, S, V

SAYABLE = [R, P, S(0), S(1)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (R, dt.Replicate()),
        (I, dt.Replicate()),
        (P, dt.Partial()),
        (S(1), dt.Shard(1)),
        (S(0, Even(4).over(2)), dt.Shard(0)),
        (S(0, Padded(4).over(2)), dt.Shard(0)),
    ],
    ids=repr,
)  # fmt: skip
def test_what_both_say(ours: AxisType, theirs: dt.Placement) -> None:
    assert placement_of(ours) == theirs
    assert axis_type_of(theirs, replicated=I if ours == I else R) == ours


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (V, "unrelated"),
        (S(0, Padded(5).over(2)), "not equal"),
        (S(0, Ragged(1, 3)), "not equal"),
        (S(0, Folded(2, Even(4)).over(2)), "not equal"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_dtensor_cannot_say(ours: AxisType, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        placement_of(ours)
    with pytest.raises(ValueError, match=reason):
        to_placements({"tp": ours}, {"tp": 2})


@pytest.mark.parametrize("theirs", [dt.Partial("avg"), dt.Partial("max")], ids=repr)
def test_what_we_cannot_say(theirs: dt.Placement) -> None:
    with pytest.raises(ValueError, match="no type of ours"):
        axis_type_of(theirs)


def test_the_order_of_cuts_is_the_meshs() -> None:
    mesh = {"dp": 2, "tp": 2}
    assert to_placements({"dp": S(0), "tp": S(0)}, mesh) == (dt.Shard(0), dt.Shard(0))
    with pytest.raises(ValueError, match="in the order"):
        to_placements({"tp": S(0), "dp": S(0)}, mesh)


def test_axes_of_one_rank_and_missing_axes() -> None:
    mesh = {"dp": 1, "tp": 2}
    assert to_placements({"tp": S(0)}, mesh) == (dt.Replicate(), dt.Shard(0))
    assert from_placements((dt.Shard(0), dt.Partial()), mesh) == {"tp": P}
    with pytest.raises(ValueError, match="'tp'"):
        to_placements({"dp": R}, mesh)
    with pytest.raises(ValueError, match="2 axes"):
        from_placements((dt.Partial(),), mesh)


@given(st.sampled_from(SAYABLE), st.sampled_from(SAYABLE), st.sampled_from([R, I]))
def test_there_and_back(dp: AxisType, tp: AxisType, replicated: AxisType) -> None:
    types = {a: replicated if t == R else t for a, t in (("dp", dp), ("tp", tp))}
    mesh = {"dp": 2, "tp": 2}
    back = from_placements(to_placements(types, mesh), mesh, replicated=replicated)
    assert back == types


def _joined_by_dtensor(pieces: list[torch.Tensor], types: Mapping[str, AxisType]) -> Any:
    mesh = device_mesh()
    placements = to_placements(types, {"dp": 2, "tp": 2})
    local = pieces[torch.distributed.get_rank()]
    return dt.DTensor.from_local(local, mesh, placements, run_check=False).full_tensor()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.sampled_from(SAYABLE), st.sampled_from(SAYABLE))
def test_placements_mean_what_types_mean(dp: AxisType, tp: AxisType) -> None:
    """DTensor puts together what `split` cut by the type."""
    types = {"dp": dp, "tp": tp}
    mesh = {"dp": 2, "tp": 2}
    value = torch.arange(16.0).reshape(4, 4)
    pieces = split(value, types, mesh)
    for whole in run_ranks(mesh, _joined_by_dtensor, pieces, types):
        torch.testing.assert_close(whole, value)


def test_a_declared_type_goes_over() -> None:
    from placements.types.mesh import Mesh

    t = declared(Mesh({"dp": 2, "tp": 2}), {"dp": S(0), "tp": P}, (2, 4))
    assert to_placements(t, t.mesh) == (dt.Shard(0), dt.Partial())
