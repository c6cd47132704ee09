"""DTensors: the local part of one, and what a call that makes one stands for here."""

import os
from itertools import combinations
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import Tensor

from placements._torch import unseen
from placements.inference.fixes import call_text
from placements.types.axis import AxisType, I, P, R, Shard
from placements.types.mesh import Mesh


def local_part(
    tensor: Tensor, mesh: Mesh | None = None
) -> tuple[Tensor, dict[str, AxisType]]:
    """Return what this rank holds; of a DTensor also its types on the axes that it handles.

    FSDP2 makes parameters and gradients DTensors, whose shape is that of the declaration.
    The axes are those of `mesh`, found by their ranks: FSDP2 may have been given a mesh
    with other names, or without any, or one dim for two axes. Without a mesh, or on one
    that is sizes alone, they are the names of the DTensor's own mesh.
    Raises ValueError if its ranks are not those of any axes of `mesh`.
    """
    own: Any = getattr(tensor, "device_mesh", None)
    if own is None:
        return tensor, {}
    dtensor: Any = tensor
    local: Tensor = dtensor.to_local()
    if mesh is None or mesh.device_mesh is None:
        return local, _types(own, dtensor.placements)
    dims = axes_over(own, mesh)
    if dims is None:
        raise ValueError(
            f"a DTensor over the ranks {sorted(ranks_in(own))}, which are not those of any "
            f"axes of {mesh!r}"
        )
    if len(dims) == own.ndim:
        each = zip(dims, dtensor.placements, strict=True)
    else:  # an axis is split over several dims: whole axes are known for all together
        each = ((dims[0], placement) for placement in _most_telling(dtensor.placements))
    types = {a: _type(placement) for axes, placement in each for a in axes}
    return local, types


def _most_telling(placements: Any) -> list[Any]:
    """Return one placement for all dims: what is put off, else what is cut."""
    order = sorted(placements, key=lambda p: (p.is_partial(), p.is_shard()))
    return order[-1:]


def axes_over(own: Any, mesh: Mesh) -> list[tuple[str, ...]] | None:
    """Return for each dim of a DeviceMesh the axes of `mesh` over the same ranks.

    If some dim is only a part of an axis, but all dims together are whole axes, those axes
    are the only entry. None if the ranks are not those of any axes.
    """
    known = _over.setdefault(own, {})
    if mesh.key not in known:
        each = [axes_with(mesh, ranks_in(own, dim)) for dim in range(own.ndim)]
        found: list[tuple[str, ...]] | None = [axes for axes in each if axes is not None]
        if len(found) < own.ndim:
            together = axes_with(mesh, ranks_in(own))
            found = None if together is None else [together]
        known[mesh.key] = found
    return known[mesh.key]


_over: "WeakKeyDictionary[Any, dict[Any, list[tuple[str, ...]] | None]]" = (
    WeakKeyDictionary()
)


def ranks_in(own: Any, dim: int | None = None) -> frozenset[int]:
    """Return the ranks of a DeviceMesh, or those of one dim that this rank sees."""
    with unseen():
        ranks, place = own.mesh, own.get_coordinate()
        if dim is not None:
            at = [slice(None) if d == dim else int(p) for d, p in enumerate(place)]
            ranks = ranks[tuple(at)]
        return frozenset(int(rank) for rank in ranks.flatten())


def axes_with(mesh: Mesh, ranks: frozenset[int]) -> tuple[str, ...] | None:
    """Return the axes whose ranks, seen from this rank, are these."""
    with unseen():
        grid = cast(Any, mesh.device_mesh).mesh
        for count in range(len(mesh.axes) + 1):
            for axes in combinations(mesh.axes, count):
                at = [slice(None) if a in axes else p for a, p in mesh.place.items()]
                if frozenset(int(rank) for rank in grid[tuple(at)].flatten()) == ranks:
                    return axes
    return None


def _types(mesh: Any, placements: Any) -> dict[str, AxisType]:
    """Return the types on the axes of a DeviceMesh that a DTensor's placements mean."""
    types: dict[str, AxisType] = {}
    for axis, placement in zip(mesh.mesh_dim_names or (), placements or (), strict=False):
        types[axis] = _type(placement)
    return types


def _type(placement: Any) -> AxisType:
    if placement.is_partial():
        return P
    return Shard(placement.dim) if placement.is_shard() else R


# Where torch has the calls of DTensors, and what each of them is called by users.
API = os.path.join("torch", "distributed", "tensor", "_api.py")
CALLS = {
    "from_local": "DTensor.from_local",
    "to_local": "DTensor.to_local",
    "redistribute": "DTensor.redistribute",
    "full_tensor": "DTensor.full_tensor",
    "distribute_tensor": "distribute_tensor",
}


def dtensor_call(frame: FrameType) -> tuple[str, str]:
    """Return the call of a DTensor that a frame runs, and what to write instead.

    A block refuses some op deep inside such a call, which the user did not write.
    """
    called = frame.f_code.co_name
    return CALLS[called], _instead(called, frame.f_locals)


def _instead(called: str, given: dict[str, Any]) -> str:
    dtensor = given.get("self")
    mesh: Any = given.get("device_mesh") or getattr(dtensor, "device_mesh", None)
    held = _types(mesh, getattr(dtensor, "placements", ()))
    wanted = _types(mesh, given.get("placements"))
    summands = {a for a, t in _types(mesh, given.get("grad_placements")).items() if t == P}
    if called in ("from_local", "to_local"):
        return _as_local(called, wanted or held, summands)
    if called == "distribute_tensor":
        moves = [("convert", axis, R, t) for axis, t in wanted.items() if t != R]
    else:
        if called == "full_tensor":  # a complete gradient on every rank, unless it says P
            wanted = {a: R if a in summands or t == R else I for a, t in held.items()}
        moves = [
            ("redistribute", axis, t, wanted.get(axis, R))
            for axis, t in held.items()
            if t != wanted.get(axis, R)
        ]
    text = "x"
    for call, axis, src, dst in moves:
        text = call_text(call, text, axis, src, dst)
    return f"{text}, where x is the {'local' if held else 'whole'} tensor"


def _as_local(called: str, placed: dict[str, AxisType], summands: set[str]) -> str:
    """Return what a tensor is in types that enters or leaves a DTensor.

    A Replicate whose gradient nobody calls Partial has a complete one on every rank, as a
    weight has that every rank repeats: that is I.
    """
    repeated = [a for a, t in placed.items() if t == R and a not in summands]
    if called == "to_local" and summands:
        used = _converted([a for a in placed if a in summands])
        return f"{used}, where x is the local tensor"
    types = {a: I if a in repeated else t for a, t in placed.items()}
    text = f"assert_type(x, {types!r}), where x is the local tensor"
    if repeated:
        text += f"; where ranks go on differently with it, {_converted(repeated)}"
    return text


def _converted(axes: list[str]) -> str:
    text = "x"
    for axis in axes:
        text = call_text("convert", text, axis, I, R)
    return text


def types_of_placements(tensor: Tensor) -> dict[str, AxisType] | None:
    """Return the types that the placements of a DTensor mean; None for a plain tensor."""
    mesh: Any = getattr(tensor, "device_mesh", None)
    return None if mesh is None else _types(mesh, cast(Any, tensor).placements)
