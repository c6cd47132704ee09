"""Tools to test distributed modules: ranks without a cluster."""

from placements.testing.failures import RankFailure as RankFailure
from placements.testing.ranks import device_mesh as device_mesh
from placements.testing.ranks import run_ranks as run_ranks
