"""The inputs of a case: global values with their types, and what each rank holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from placements._torch import unseen
from placements.annotations.declarations import assert_type
from placements.runtime.declared import declared
from placements.testing.draw.arguments import checked_type
from placements.testing.draw.placed import part_of
from placements.testing.draw.whole_numbers import seeded
from placements.testing.ranks.run import device_mesh
from placements.types.axis import AxisType, Partial, Shard, TypesLike
from placements.types.extents import Padded
from placements.types.meaning import split
from placements.types.mesh import Mesh, as_mesh
from placements.types.tensor import TensorType

TypedValue: TypeAlias = tuple[Tensor, TypesLike]


@dataclass(frozen=True)
class GlobalInput:
    """A global value, its types with the extents of all cuts, and each rank's shape."""

    value: Tensor
    types: dict[str, AxisType]
    shapes: list[tuple[int, ...]]
    wants_gradient: bool


def global_input(fn: Callable[..., Any], name: str, placed: Any, mesh: Mesh) -> GlobalInput:
    """Check an input; ValueError unless it is a global value and a type that fits."""
    what = f"input {name!r}"
    pair: list[Any] = list(placed) if isinstance(cast(object, placed), tuple) else []
    kinds = [isinstance(x, k) for x, k in zip(pair, (Tensor, Mapping), strict=False)]
    if len(pair) != 2 or not all(kinds):
        raise ValueError(
            f"{what} must be a tuple (global value, {{axis: type}}), "
            f"got {type(placed).__name__}"
        )
    value = cast(Tensor, pair[0])
    types = _with_totals(what, value, pair[1], mesh)
    try:
        shapes = [tuple(piece.shape) for piece in split(value, types, mesh)]
        for place, shape in zip(mesh.coordinates(), shapes, strict=True):
            declared(mesh.seen_from(place), types, shape)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    buffers = dict(fn.named_buffers()) if isinstance(fn, nn.Module) else {}
    wants_gradient = value.is_floating_point() and name not in buffers
    return GlobalInput(value.detach(), types, shapes, wants_gradient)


def _with_totals(
    what: str, value: Tensor, types: TypesLike, mesh: Mesh
) -> dict[str, AxisType]:
    """Give each outer Shard an extent; without one it is cut as torch.chunk does."""
    whole: dict[str, AxisType] = {}
    for axis, like in types.items():
        t = checked_type(what, axis, like, value.dim())
        if mesh.sizes.get(axis) == 1:  # it cuts nothing, so it is no outer cut either
            continue
        if isinstance(t, Partial) and value.dtype is torch.bool:
            raise ValueError(f"{what} is Partial on {axis!r}, but booleans have no sum")
        if isinstance(t, Shard) and t.extent is None:
            seen = [x.dim for x in whole.values() if isinstance(x, Shard)]
            t = Shard(t.dim, None if t.dim in seen else Padded(value.shape[t.dim]))
        whole[axis] = t
    return whole


def part_here(name: str, one: GlobalInput, seed: int) -> tuple[Tensor, TensorType]:
    """Return what this rank holds of an input, and its type here."""
    with unseen():
        t = declared(as_mesh(device_mesh()), one.types, one.shapes[dist.get_rank()])
        local = part_of(one.value, t, seeded(seed, "part", name))
        return local.detach().requires_grad_(one.wants_gradient), t


def typed_part(name: str, one: GlobalInput, seed: int) -> Tensor:
    """Return what this rank holds of an input, declared."""
    return assert_type(*part_here(name, one, seed))
