"""All bugs, in the order of their numbers."""

from spmd_moe.bugs import c01_gradient_never_reduced
from spmd_moe.bugs.record import Bug

BUGS: tuple[Bug, ...] = tuple(
    sorted(
        (*c01_gradient_never_reduced.BUGS,),
        key=lambda bug: bug.id,
    )
)
