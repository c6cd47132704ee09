"""Parts of a dim that is cut: one part is all of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    PlacementError,
    S,
    assert_type,
    axis_rank,
    set_current_mesh,
    type_of,
    typecheck,
)

PARTS: dict[str, Callable[[Tensor, Any], Any]] = {
    "chunk": lambda x, n: x.chunk(n, 0),
    "by keyword": lambda x, n: torch.chunk(x, chunks=n),
    "tensor_split": lambda x, n: x.tensor_split(n),
    "vsplit": lambda x, n: x.vsplit(n),
}


@pytest.mark.parametrize("name", PARTS)
def test_one_part_of_a_piece_is_the_piece(name: str) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        x = assert_type(torch.randn(2, 3), {"a": S(0)})
        (part,) = PARTS[name](x, 1)
        assert type_of(part) == {"a": S(0)}
        for parts in (2, axis_rank("a") + 1):
            with pytest.raises(PlacementError):
                PARTS[name](x, parts)
