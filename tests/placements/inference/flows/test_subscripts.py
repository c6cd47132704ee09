"""Subscripts of uint8, which torch takes for masks and not for numbers of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    PlacementError,
    R,
    S,
    V,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)

pytestmark = pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")


def byte(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_a_piece_that_is_masked_by_bytes_is_varying() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        assert type_of(x[torch.arange(x.shape[0]).to(torch.uint8)]) == {"a": V}
        mask = assert_type(byte(1, 0), {"a": S(0)})
        assert type_of(x[mask]) == {"a": V}


def test_a_whole_that_is_masked_by_bytes_is_whole() -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": R})
        part = x[assert_type(byte(0, 1), {"a": R})]
        assert type_of(part) == {"a": R} and part.shape == (1, 3)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "setitem": lambda x, own: x.__setitem__(own, torch.zeros(1, 3)),
    "index_put_": lambda x, own: x.index_put_((own,), torch.zeros(1, 3)),
}


@pytest.mark.parametrize("name", WRITES)
def test_numbers_of_own_rows_are_no_mask_of_a_piece(name: str) -> None:
    """Rank r counts from 0, so its mask begins with False; on one device one row does."""
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        own = torch.arange(x.shape[0]).to(torch.uint8)
        with pytest.raises(PlacementError):
            WRITES[name](x, own)
        assert type_of(x.index_put((own,), torch.zeros(1, 3))) == {"a": V}
