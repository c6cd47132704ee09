"""The rows of docs/differences.md that call something a bug of the peer, shown."""

import pytest
import spmd_types
import torch

from placements.interop.fake_world import quiet
from placements.interop.spmd_types import SpmdTypes
from placements.testing import RankFailure, device_mesh, run_ranks
from placements.types.mesh import as_mesh


def _convert(rows: int) -> None:
    with (
        spmd_types.set_current_mesh(device_mesh()),
        spmd_types.checker.typecheck(local=False),
    ):
        x = torch.randn(rows, requires_grad=True)
        spmd_types.assert_type(x, {"tp": spmd_types.R})
        y = spmd_types.convert(x, "tp", src=spmd_types.R, dst=spmd_types.S(0))
    torch.autograd.grad(y, x, torch.ones_like(y))


def test_an_uneven_cut_is_accepted_and_goes_wrong_in_backward() -> None:
    """Row "lengths are not tracked": 3 rows over 2 ranks."""
    with quiet(), pytest.raises(RankFailure, match="invalid gradient"):
        run_ranks({"tp": 2}, _convert, 3)


def test_a_rank_without_rows_raises_in_forward() -> None:
    """Row "lengths are not tracked": 1 row over 2 ranks; rank 0 sees nothing wrong."""
    with quiet(), pytest.raises(RankFailure, match=r"rank 1 .*IndexError"):
        run_ranks({"tp": 2}, _convert, 1)


def _scattered() -> tuple[int, int]:
    with SpmdTypes(local=False).checking(as_mesh({"dp": 2, "tp": 2})):
        x = torch.randn(2, 2)
        spmd_types.assert_type(x, {"dp": spmd_types.S(1), "tp": spmd_types.P})
        y = spmd_types.reduce_scatter(x, "tp", src=spmd_types.P, dst=spmd_types.V)
        spec = spmd_types.get_partition_spec(y)
        assert spec is not None
        return y.dim(), len(spec)


def test_a_partition_spec_outlives_its_dim() -> None:
    """Row "dims are not renumbered": a spec of two dims on a tensor of one."""
    from placements.interop.fake_world import fake_world

    with fake_world():
        assert _scattered() == (1, 2)
