"""The norm of all gradients over the whole mesh, and clipping by it.

Which ranks hold which elements follows from the types: pieces (Shard) and unrelated
values (Varying) are summed over their axis, equal values (Replicate, Invariant) count
once. There are no flags to forget.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from placements._torch import unseen
from placements.collectives.transport import AxisRanks, stack_all
from placements.inference.fixes import call_text
from placements.parameters.gradients import (
    gradient_type,
    handled_axes,
    own_memory,
    partial_axes,
    refuse_frozen,
)
from placements.parameters.held import (
    Held,
    Meshes,
    meshes_or_current,
    ranks_of,
    trained_parameters,
)
from placements.runtime import tags
from placements.runtime.dtensors import local_part
from placements.runtime.errors import mismatch
from placements.runtime.gradient_watch import watch_noted
from placements.runtime.state import suspended
from placements.types.axis import P, R
from placements.types.tensor import TensorType

# Where elements of the gradients lie: the ranks over which shares of the norm add up, axis
# by axis, and dim by dim of the mesh of a DTensor.
_Spread = tuple[AxisRanks, ...]


def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    meshes: Meshes = None,
) -> Tensor:
    """Gradients, reduced -> the same, scaled in place so that their norm is `max_norm`.

    Returns the norm before clipping, equal on all ranks: that of one device, each element
    counted once. `meshes` as for `reduce_gradients`.
    Communicates: one number over each axis that splits a parameter.
    Raises PlacementError for a gradient that is still Partial: reduce it first.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}, must be greater than 0, or inf")
    call = "clip_grad_norm_"
    with unseen(), suspended(), torch.no_grad():
        known = meshes_or_current(call, meshes)
        held = trained_parameters(call, module, known)
        refuse_frozen(call, module, known)
        spreads = [_spread(call, one) for one in held]
        by_spread: dict[_Spread, list[Tensor]] = {spread: [] for spread in spreads}
        for one, spread in zip(held, spreads, strict=True):
            if one.tensor.grad is not None:
                own_memory(call, one)
                watch_noted(one.tensor)
                by_spread[spread].append(local_part(one.tensor.grad)[0])
        grads = [grad for some in by_spread.values() for grad in some]
        norm = _total_norm(by_spread, norm_type, _zero_like(held))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"{call}: the norm of the gradients is {norm.item()}, must be finite"
            )
        # The number that torch adds to the denominator: results are to be torch's.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device))
        tags.put(norm, TensorType(known[0], (R,) * len(known[0].axes)))
        return norm


def _zero_like(held: Sequence[Held]) -> Tensor:
    """Zero in the dtype in which norms add up; the same on every rank."""
    if not held:
        return torch.zeros(())
    double = any(one.tensor.dtype in (torch.float64, torch.complex128) for one in held)
    dtype = torch.float64 if double else torch.float32
    return torch.zeros((), dtype=dtype, device=held[0].tensor.device)


def _spread(call: str, held: Held) -> _Spread:
    """Return where the gradient lies; the same on every rank, also where there is none."""
    handled = handled_axes(call, held, held.tensor)
    if held.tensor.grad is None:
        found = held.type
    else:
        found = gradient_type(held, call)
        pending = partial_axes(found)
        if pending:
            raise mismatch(
                call, f"the gradient of {held.name!r}", pending[0], "Replicate", "Partial",
                rule="each rank holds one summand; the norm of the sum is not the sum of "
                "norms",
                advice="if nothing has summed it, reduce_gradients(module) first; if "
                "other means did, a second sum would count it once for every rank: sum by "
                "typed collectives, which are known: p.grad = "
                + call_text("all_reduce", "p.grad", pending[0], P, R),
            )  # fmt: skip
    axes = [a for a in found.mesh.axes if found[a].letter in "SV" and a not in handled]
    return *(ranks_of(found.mesh, axis) for axis in axes), *_shards(held.tensor)


def _shards(parameter: Tensor) -> Iterator[AxisRanks]:
    """Yield the ranks that hold shards of a DTensor, for each dim of its mesh that cuts."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    whole, place = cast(Any, parameter), mesh.get_coordinate()
    for dim, placement in enumerate(whole.placements):
        if placement.is_shard() and mesh.size(dim) > 1:
            group = mesh.get_group(dim)
            yield AxisRanks(f"dim {dim}", mesh.size(dim), int(place[dim]), group)


def _total_norm(
    by_spread: dict[_Spread, list[Tensor]], norm_type: float, zero: Tensor
) -> Tensor:
    shares: list[Tensor] = []
    for spread, grads in by_spread.items():
        share = _norm_here(grads, norm_type, zero)
        share = share if math.isinf(norm_type) else share**norm_type
        for ranks in spread:
            # Gathered and added in rank order, so that all ranks get the same bits.
            every = stack_all(ranks, share)
            share = every.amax() if math.isinf(norm_type) else every.sum()
        shares.append(share)
    if not shares:
        return zero
    every = torch.stack(shares)
    if math.isinf(norm_type):
        return every.amax()
    return every.sum() ** (1.0 / norm_type)


def _norm_here(grads: Sequence[Tensor], norm_type: float, zero: Tensor) -> Tensor:
    """Return the norm of this rank's elements; half precision adds up in float32."""
    wide = [g.float() if g.element_size() < 4 else g for g in grads if g.numel()]
    return get_total_norm(wide, norm_type).to(zero) if wide else zero
