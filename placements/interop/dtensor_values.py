"""DTensor <-> typed local tensor: `wrap` and `unwrap`, with lengths and gradients said.

`DTensor.from_local` guesses the global size from this rank's piece, and `to_local` declares
that a gradient is complete. Here the size comes from the type, and the gradient's type has
no default: it must be the dual of the value's.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch.distributed.tensor as peer
from torch import Size, Tensor

import placements as pl
from placements._torch import unseen
from placements.interop.dtensor import axis_type_of, placement_of
from placements.runtime.declared import declared
from placements.runtime.state import suspended
from placements.types.axis import AxisType, R, Shard, TypesLike
from placements.types.extents import Extent, Folded, Padded
from placements.types.mesh import Mesh, MeshLike, as_mesh
from placements.types.tensor import TensorType, make
from placements.types.text import as_axis_type


def types_in(value: Any, mesh: MeshLike, *, replicated: AxisType = R) -> TensorType:
    """Return the type of a DTensor, with the lengths that its global size gives.

    `mesh` has the axes of the DTensor's own mesh. A strided shard is a Folded extent.
    """
    mesh, types = as_mesh(mesh), dict[str, AxisType]()
    lengths = list(value.shape)
    cut: set[int] = set()
    for axis, placement in zip(mesh.sizes, value.placements, strict=True):
        factor = getattr(placement, "split_factor", None)
        if factor is None:
            t = axis_type_of(placement, replicated=replicated)
        else:
            t = Shard(placement.dim)
        if mesh.sizes[axis] == 1:
            continue
        if isinstance(t, Shard):
            if factor is not None and (t.dim in cut or lengths[t.dim] % factor):
                raise ValueError(
                    f"{placement!r} cuts a dim in {factor} blocks that another axis cuts, "
                    "too, or that are not equal: no type of ours says so; redistribute "
                    "the DTensor to Shard first"
                )
            t = Shard(t.dim, _extent(lengths[t.dim], mesh, axis, factor))
            assert t.extent is not None
            lengths[t.dim] = t.extent.local_size(mesh.place[axis])
            cut.add(t.dim)
        types[axis] = t
    return make(mesh, types)


def _extent(length: int, mesh: Mesh, axis: str, factor: int | None) -> Extent:
    if factor is None:
        return Padded(length).over(mesh.sizes[axis])
    return Folded(factor, Padded(length // factor)).over(mesh.sizes[axis])


def wrap(x: Tensor, types: TypesLike, mesh: MeshLike, *, grads: TypesLike) -> Any:
    """Return the DTensor of a local tensor of these types; its gradient is of type `grads`.

    An extent says how unequal pieces are cut: S(0, Padded(5)). The pieces must lie as
    DTensor cuts, like `torch.chunk` and in the order of the mesh.
    """
    with unseen():
        mesh = as_mesh(mesh)
        assert mesh.device_mesh is not None, "wrap needs a DeviceMesh"
        found = declared(mesh, types, tuple(x.shape))
        _check_dual(found, grads)
        shape, lengths = found.global_shape(tuple(x.shape)), dict[int, int]()
        for axis in mesh.axes:
            t = found[axis]
            if not isinstance(t, Shard):
                continue
            length = lengths.get(t.dim, shape[t.dim])
            wanted = _extent(length, mesh, axis, None)
            outermost = found.cuts(t.dim)[0][0] == axis
            if t.extent != wanted or (t.dim not in lengths and not outermost):
                raise ValueError(
                    f"{t!r} on axis {axis!r} is no DTensor placement: DTensor cuts in the "
                    f"order of the mesh and like torch.chunk, here {Shard(t.dim, wanted)!r}"
                )
            lengths[t.dim] = wanted.local_size(mesh.place[axis])
        stride, step = list[int](), 1
        for size in reversed(shape):
            stride, step = [step, *stride], step * max(size, 1)
        with suspended():
            return peer.DTensor.from_local(
                x, mesh.device_mesh, _placements(found), run_check=False,
                shape=Size(shape), stride=tuple(stride),
                grad_placements=_placements(found.dual()),
            )  # fmt: skip


def unwrap(value: Any, types: TypesLike, mesh: MeshLike, *, grads: TypesLike) -> Tensor:
    """Return the local tensor of a DTensor, which is of these types.

    In a `typecheck()` block it has its type, with the lengths of its pieces.
    """
    with unseen(), suspended():
        mesh = as_mesh(mesh)
        found = declared(mesh, types, tuple(value.to_local().shape))
        _check_dual(found, grads)
        own = types_in(value, mesh)
        for axis, t in own.items():
            same = found[axis].letter in "RI" if t == R else found[axis] == t
            open_cut = isinstance(t, Shard) and as_axis_type(types[axis]) == Shard(t.dim)
            if not same and not open_cut:
                raise ValueError(
                    f"the DTensor is {t!r} on axis {axis!r}, expected {found[axis]!r}"
                )
        exact = {a: t if isinstance(t, Shard) else found[a] for a, t in own.items()}
        gradients = _placements(make(mesh, exact).dual())
        local = cast(Tensor, value.to_local(grad_placements=gradients))
    return pl.assert_type(local, exact)


def _check_dual(found: TensorType, grads: TypesLike) -> None:
    """Raise ValueError unless the gradient is said to be the dual of the value."""
    for axis, t in found.dual().items():
        said = as_axis_type(grads[axis]) if axis in grads else None
        if said is None or said.letter != t.letter:
            raise ValueError(
                f"grads says {said!r} on axis {axis!r}, expected {t!r}: the gradient of a "
                f"value that is {found[axis]!r}. A gradient that is complete on every rank "
                "belongs to an Invariant value"
            )


def _placements(found: Mapping[str, AxisType]) -> list[peer.Placement]:
    """Return one placement for each axis of the mesh; lengths go with the global size."""
    mesh = cast(TensorType, found).mesh
    made = {
        axis: placement_of(Shard(t.dim) if isinstance(t, Shard) else t)
        for axis, t in found.items()
    }
    return [made.get(axis, peer.Replicate()) for axis in mesh.sizes]
