"""Tests that run on a mesh of sizes alone, most of them with checking on."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import assert_type, set_current_mesh, typecheck


def mesh_of(**sizes: int) -> Any:
    """A fixture for all tests of a file: the current mesh has these sizes."""

    @pytest.fixture(autouse=True)
    def mesh() -> Iterator[None]:
        with set_current_mesh(sizes):
            yield

    return mesh


def checked_on(**sizes: int) -> Any:
    """A fixture for all tests of a file: checking is on, on a mesh of these sizes."""

    @pytest.fixture(autouse=True)
    def checked() -> Iterator[None]:
        with set_current_mesh(sizes), typecheck():
            yield

    return checked


def ones_of(t: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ones with the type `t` on tp."""
    return assert_type(torch.ones(shape, dtype=dtype), {"tp": t})


def random_of(t: Any, *shape: int) -> Tensor:
    """Random numbers with the type `t` on tp, 3x4 if no shape is given."""
    return assert_type(torch.randn(*shape or (3, 4)), {"tp": t})
