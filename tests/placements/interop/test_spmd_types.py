"""Our types in the words of spmd_types and back."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import spmd_types
import torch
from hypothesis import given
from hypothesis import strategies as st

from placements import Even, Folded, Padded
from placements.interop.fake_world import device_mesh_of, fake_world
from placements.interop.spmd_types import (
    SpmdTypes,
    axis_type_from_peer,
    axis_type_to_peer,
    from_peer,
    to_peer,
)
from placements.runtime.declared import declared
from placements.types.axis import AxisType, I, P, R, S, V
from placements.types.mesh import Mesh

MESH = Mesh({"dp": 2, "tp": 2})
WORDS = [R, I, V, P, S(0), S(1)]


@pytest.mark.parametrize("ours", WORDS, ids=repr)
def test_words_there_and_back(ours: AxisType) -> None:
    theirs = axis_type_to_peer(ours)
    assert repr(theirs) == repr(ours)
    assert axis_type_from_peer(theirs) == ours


@pytest.mark.parametrize(
    "extent", [Padded(5).over(2), Folded(2, Even(4)).over(2)], ids=repr
)
def test_what_spmd_types_cannot_say(extent: Padded) -> None:
    with pytest.raises(ValueError, match="equal pieces only"):
        axis_type_to_peer(S(0, extent))


def test_what_we_cannot_say() -> None:
    with pytest.raises(ValueError, match="not a type"):
        axis_type_from_peer("R")
    with pytest.raises(ValueError, match="no type on mesh axis 'tp'"):
        from_peer({"dp": spmd_types.R}, None, MESH)
    with pytest.raises(ValueError, match="yet the PartitionSpec"):
        from_peer({"dp": spmd_types.R, "tp": spmd_types.R}, ("dp",), MESH)


@given(st.permutations(["dp", "tp"]), st.sampled_from(WORDS), st.sampled_from(WORDS))
def test_types_there_and_back(axes: list[str], first: AxisType, second: AxisType) -> None:
    t = declared(MESH, dict(zip(axes, (first, second), strict=True)), (4, 4))
    said, spec = to_peer(t, 2)
    assert repr(from_peer(said, spec, MESH)) == repr(t)


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world():
        yield


@pytest.mark.parametrize("local", [True, False], ids=["local", "global"])
def test_a_tensor_keeps_its_type(world: None, local: bool) -> None:
    engine = SpmdTypes(local=local)
    for types in ({"dp": S(0), "tp": P}, {"tp": S(1), "dp": S(1)}, {"dp": I, "tp": R}):
        t = declared(MESH, types, (4, 4))
        x = torch.ones(4, 4)
        with engine.checking(MESH):
            engine.declare(x, t)
            assert repr(engine.type_of(x, MESH)) == repr(engine.projected(t))


def test_the_fake_world_can_be_entered_again() -> None:
    for _ in range(2):
        with fake_world():
            assert device_mesh_of(MESH).shape == (2, 2)
            with pytest.raises(ValueError, match="initialised already"), fake_world():
                pass
    assert not torch.distributed.is_initialized()


def test_importing_placements_imports_no_peer() -> None:
    code = (
        "import sys, placements, placements.interop; "
        "print([m for m in ('spmd_types', 'placements.interop.compare') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
