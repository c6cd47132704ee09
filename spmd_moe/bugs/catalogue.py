"""All bugs, in the order of their numbers."""

from spmd_moe.bugs.programs import (
    c01_gradient_never_reduced,
    c01_wrappers,
    c02_scaled_by_a_group,
    c03_partial_misused,
    c04_padding,
    c04_statistics,
    c05_provenance,
    c06_extents,
    c07_dropped_gradient,
    c08_lockstep,
    c09_wrong_group,
    c10_normalisation,
    c11_random_state,
    c12_dtype,
    c13_buffers,
    c14_checkpoints,
)
from spmd_moe.bugs.record import Bug

BUGS: tuple[Bug, ...] = tuple(
    sorted(
        (
            *c01_gradient_never_reduced.BUGS,
            *c01_wrappers.BUGS,
            *c02_scaled_by_a_group.BUGS,
            *c03_partial_misused.BUGS,
            *c04_padding.BUGS,
            *c04_statistics.BUGS,
            *c05_provenance.BUGS,
            *c06_extents.BUGS,
            *c07_dropped_gradient.BUGS,
            *c08_lockstep.BUGS,
            *c09_wrong_group.BUGS,
            *c10_normalisation.BUGS,
            *c11_random_state.BUGS,
            *c12_dtype.BUGS,
            *c13_buffers.BUGS,
            *c14_checkpoints.BUGS,
        ),
        key=lambda bug: bug.id,
    )
)
