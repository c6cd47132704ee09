"""Our types as DTensor placements, and back; programs under DTensor's propagation.

Replicate, Shard and Partial are the same ideas. DTensor has no word for Varying, none for
uneven or folded pieces that it would get right, and one word for Replicate and Invariant.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch.distributed.tensor as peer
from torch import Tensor

from placements._torch import explicit_redistribution
from placements.interop.engines import Engine
from placements.interop.fake_world import device_mesh_of, quiet
from placements.types.axis import AxisType, I, P, R, Shard, TypesLike, V
from placements.types.mesh import Mesh, MeshLike, as_mesh
from placements.types.tensor import TensorType, make
from placements.types.text import as_axis_type

_WHY_NOT = {
    "V": "its values are unrelated, and DTensor places one global tensor",
    "S": "DTensor would infer another global size for pieces that are not equal",
}


def placement_of(t: AxisType) -> peer.Placement:
    """Return the placement for one mesh axis; ValueError if DTensor has none.

    Invariant becomes Replicate: DTensor does not tell them apart.
    """
    if isinstance(t, Shard) and (t.extent is None or t.extent.is_even):
        return peer.Shard(t.dim)
    if t in (R, I):
        return peer.Replicate()
    if t == P:
        return peer.Partial()
    raise ValueError(f"{t!r} is no DTensor placement: {_WHY_NOT[t.letter]}")


def axis_type_of(placement: peer.Placement, *, replicated: AxisType = R) -> AxisType:
    """Return our type for a placement; `replicated` is what Replicate means, R or I."""
    # By exact class: a _StridedShard is a Shard to isinstance, and is not ours.
    kind = type(placement)
    if kind is peer.Replicate:
        return replicated
    if kind is peer.Shard:
        return Shard(cast(Any, placement).dim)
    if kind is peer.Partial and cast(Any, placement).reduce_op == "sum":
        return P
    raise ValueError(
        f"{placement!r} is no type of ours: Replicate(), Shard(dim), Partial('sum') are"
    )


def to_placements(types: TypesLike, mesh: MeshLike) -> tuple[peer.Placement, ...]:
    """Return one placement for each axis of the mesh, axes of size 1 included.

    ValueError for what DTensor cannot say, such as axes that cut one dim in an order other
    than the mesh's.
    """
    mesh = as_mesh(mesh)
    said = {axis: as_axis_type(t) for axis, t in types.items() if axis in mesh.sizes}
    order = [axis for axis in mesh.sizes if axis in said]
    for axis, t in said.items():
        if not isinstance(t, Shard):
            continue
        cuts = [a for a, u in said.items() if isinstance(u, Shard) and u.dim == t.dim]
        if cuts != [a for a in order if a in cuts]:
            raise ValueError(
                f"dim {t.dim} is cut in the order {cuts}, and DTensor cuts in the order "
                f"of the mesh, {list(mesh.sizes)}"
            )
        if mesh.sizes[axis] > 1:
            placement_of(t)
    missing = [axis for axis in mesh.axes if axis not in said]
    if missing:
        raise ValueError(f"no type is given for mesh axis {missing[0]!r}")
    return tuple(
        placement_of(said[axis]) if size > 1 else peer.Replicate()
        for axis, size in mesh.sizes.items()
    )


def from_placements(
    placements: Sequence[peer.Placement], mesh: MeshLike, *, replicated: AxisType = R
) -> TensorType:
    """Return our type for placements, one for each axis of the mesh."""
    mesh = as_mesh(mesh)
    if len(placements) != len(mesh.sizes):
        raise ValueError(f"{mesh!r} has {len(mesh.sizes)} axes, got {placements!r}")
    types = {
        axis: axis_type_of(placement, replicated=replicated)
        for axis, placement in zip(mesh.sizes, placements, strict=True)
        if mesh.sizes[axis] > 1
    }
    return make(mesh, types)


class NotAsked(Exception):  # noqa: N818 - not an error: the engine has no such call
    """DTensor has no such call."""


# The calls that keep the value, and so are a `redistribute` of DTensor.
_KEEP_VALUE = {
    "all_reduce": ("PR", "PI"),
    "all_gather": ("SR", "SI"),
    "reduce_scatter": ("PS",),
    "all_to_all": ("SS",),
    "convert": ("IR", "RI", "RS", "IS", "SP", "RP", "IP"),
    "redistribute": (
        "PR PI SR SI PS SS IR RI RS IS SP RP IP RR II PP".split()
    ),
}  # fmt: skip


def _moved(call: str) -> Any:
    def redistribute(x: Any, axis: str, *, src: AxisType, dst: AxisType) -> Any:
        if src.letter + dst.letter not in _KEEP_VALUE.get(call, ()):
            raise NotAsked(f"{call} {src!r} -> {dst!r}")
        at = x.device_mesh.mesh_dim_names.index(axis)
        placements = list(x.placements)
        if placements[at] != placement_of(src):
            raise ValueError(f"the tensor is {placements[at]} on {axis!r}, not {src!r}")
        placements[at] = placement_of(dst)
        return x.redistribute(x.device_mesh, placements)

    return redistribute


class DTensorEngine(Engine):
    """DTensor's propagation; an op that needs a redistribution first is refused."""

    name = "DTensor"
    refusals = (RuntimeError, ValueError, NotAsked)  # NotImplementedError is the first, too
    names: Mapping[str, Any] = {
        **{"R": R, "I": I, "V": V, "P": P, "S": Shard},
        **{call: _moved(call) for call in (*_KEEP_VALUE, "reinterpret")},
    }

    def checking(self, mesh: Mesh) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(quiet())
        stack.enter_context(explicit_redistribution(strict=True))
        return stack

    def declare(self, local: Tensor, t: TensorType) -> Any:
        mesh = device_mesh_of(t.mesh)
        placements = to_placements(t, t.mesh)
        return peer.DTensor.from_local(local, mesh, placements, run_check=False)

    def type_of(self, value: Any, mesh: Mesh) -> TensorType:
        return from_placements(value.placements, mesh)

    def says(self, t: AxisType) -> AxisType | None:
        if isinstance(t, Shard):
            return t if t.extent is None or t.extent.is_even else None
        return None if t == V else R if t == I else t

    def projected(self, t: TensorType) -> TensorType | None:
        said = super().projected(t)
        in_mesh_order = said is not None and list(said) == list(said.mesh.axes)
        return said if in_mesh_order else None
