"""Two meshes over the same ranks: `reinterpret_mesh` moves a tensor's type between them.

Both meshes list the same ranks in the same order and only name the axes differently, as
a dense mesh (dp, cp, tp) and a sparse one (edp, ep, etp) do. Nothing moves.
"""

from torch import Tensor

from placements._torch import unseen
from placements.inference.presentations import presented
from placements.inference.terms import Refusal
from placements.runtime import tags
from placements.runtime.callsite import name_of
from placements.runtime.describe import described
from placements.runtime.errors import refused_call, type_or_error
from placements.runtime.state import current
from placements.types.mesh import MeshLike, as_mesh


def reinterpret_mesh(x: Tensor, mesh: MeshLike) -> Tensor:
    """A type on one presentation of the ranks -> the same on another.

    Axes that cover the same ranks must say the same: R, I, V or P on all of them, or cuts
    of one dim that nest. Communicates nothing, forward or backward.
    Raises PlacementError with the reason if the type cannot be said on the other mesh.
    """
    target = as_mesh(mesh)
    if current.mode is None:
        other = current.other
        return x if other is None else other.presented(x, target)
    with unseen():
        known = type_or_error(x, "reinterpret_mesh")
        try:
            found = presented(known, target)
        except Refusal as refusal:
            name = name_of(x) or "x"
            raise refused_call(
                "reinterpret_mesh",
                f"{name} on {known.mesh!r} cannot be presented on {target!r}",
                name=name,
                axis=refusal.axis,
                expected=repr(target),
                actual=repr(known),
                rule=refusal.reason,
                operands=[described(x, known)],
            ) from None
        result = x.view_as(x)
        tags.put(result, found)
        return result
