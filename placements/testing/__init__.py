"""Tools to test distributed modules: ranks without a cluster."""

from placements.testing import laws as laws
from placements.testing import strategies as strategies
from placements.testing.adjoint import check_adjoint as check_adjoint
from placements.testing.equivalence import assert_spmd_equivalent as assert_spmd_equivalent
from placements.testing.failures import RankFailure as RankFailure
from placements.testing.ranks import device_mesh as device_mesh
from placements.testing.ranks import run_ranks as run_ranks
from placements.testing.spmd_case import check_spmd_case as check_spmd_case
