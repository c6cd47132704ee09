"""Tools to test distributed modules: ranks without a cluster.

What draws its cases needs hypothesis, which is imported when one of those names is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from placements.testing.compare.adjoint import check_adjoint as check_adjoint
from placements.testing.compare.case import check_as_it_is as check_as_it_is
from placements.testing.compare.case import check_spmd_case as check_spmd_case
from placements.testing.ranks.failures import RankFailure as RankFailure
from placements.testing.ranks.run import device_mesh as device_mesh
from placements.testing.ranks.run import run_ranks as run_ranks

if TYPE_CHECKING:
    from placements.testing import laws as laws
    from placements.testing import strategies as strategies
    from placements.testing.compare.equivalence import (
        assert_spmd_equivalent as assert_spmd_equivalent,
    )

# With a star, too; that needs hypothesis.
__all__ = [
    "RankFailure",
    "assert_spmd_equivalent",
    "check_adjoint",
    "check_as_it_is",
    "check_spmd_case",
    "device_mesh",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name in ("laws", "strategies"):
        return importlib.import_module(f"{__name__}.{name}")
    if name == "assert_spmd_equivalent":
        return importlib.import_module(
            f"{__name__}.compare.equivalence"
        ).assert_spmd_equivalent
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
