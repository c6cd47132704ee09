"""What a typed collective refuses before anything is sent."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    P,
    R,
    S,
    all_gather,
    assert_type,
    reduce_scatter,
    set_current_mesh,
    typecheck,
)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with set_current_mesh({"tp": 2}), typecheck():
        yield


def of(t: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return assert_type(torch.ones(shape, dtype=dtype), {"tp": t})


@pytest.mark.parametrize("dim", [5, -5])
def test_a_dim_that_does_not_exist_is_an_error(dim: int) -> None:
    with pytest.raises(ValueError, match="do not have"):
        all_gather(of(S(0), 2, 3), "tp", src=S(dim), dst=R)
    with pytest.raises(ValueError, match="do not have"):
        reduce_scatter(of(P, 2, 3), "tp", src=P, dst=S(dim))
