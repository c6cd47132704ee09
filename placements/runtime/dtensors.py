"""DTensors: the local part of one, and what a call that makes one stands for here."""

import os
from types import FrameType
from typing import Any

from torch import Tensor

from placements.inference.fixes import call_text
from placements.types.axis import AxisType, P, R, Shard


def local_part(tensor: Tensor) -> tuple[Tensor, dict[str, AxisType]]:
    """Return what this rank holds; of a DTensor also its types on the axes that it handles.

    FSDP2 makes parameters and gradients DTensors, whose shape is that of the declaration.
    """
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return tensor, {}
    dtensor: Any = tensor
    return dtensor.to_local(), _types(mesh, dtensor.placements)


def _types(mesh: Any, placements: Any) -> dict[str, AxisType]:
    """Return the types on the axes of a DeviceMesh that a DTensor's placements mean."""
    types: dict[str, AxisType] = {}
    for axis, placement in zip(mesh.mesh_dim_names or (), placements or (), strict=False):
        if placement.is_partial():
            types[axis] = P
        else:
            types[axis] = Shard(placement.dim) if placement.is_shard() else R
    return types


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
    if called in ("from_local", "to_local"):
        said = ", ".join(f"{axis!r}: {t!r}" for axis, t in (wanted or held).items())
        return f"assert_type(x, {{{said}}}), where x is the local tensor"
    if called == "distribute_tensor":
        moves = [("convert", axis, R, t) for axis, t in wanted.items() if t != R]
    else:
        moves = [
            ("redistribute", axis, t, wanted.get(axis, R))
            for axis, t in held.items()
            if t != wanted.get(axis, R)
        ]
    text = "x"
    for call, axis, src, dst in moves:
        text = call_text(call, text, axis, src, dst)
    return f"{text}, where x is the {'local' if held else 'whole'} tensor"
