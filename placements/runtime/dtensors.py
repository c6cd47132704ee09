"""The local part of a tensor that may be a DTensor."""

from typing import Any

from torch import Tensor

from placements.types.axis import AxisType, P, R, Shard


def local_part(tensor: Tensor) -> tuple[Tensor, dict[str, AxisType]]:
    """What this rank holds, and, of a DTensor, its types on the axes it handles itself.

    FSDP2 makes parameters and gradients DTensors, whose shape is that of the declaration.
    """
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, {}
    dtensor: Any = tensor
    types: dict[str, AxisType] = {}
    for axis, placement in zip(mesh.mesh_dim_names, dtensor.placements, strict=True):
        if placement.is_partial():
            types[axis] = P
        else:
            types[axis] = Shard(placement.dim) if placement.is_shard() else R
    return dtensor.to_local(), types
