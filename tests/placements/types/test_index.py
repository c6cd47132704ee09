"""Integers that number the rows of a dim: what keeps this knowledge and what drops it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from placements import (
    Index,
    PlacementError,
    S,
    assert_type,
    set_current_mesh,
    type_of,
    typecheck,
)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with set_current_mesh({"tp": 4}), typecheck():
        yield


def of(t: object, *shape: int) -> Tensor:
    return assert_type(torch.randn(*shape or (3, 4)), {"tp": t})  # type: ignore[dict-item]


def test_an_index_is_kept_by_selection_and_dropped_by_arithmetic() -> None:
    scores = of(S(0), 6, 8)
    _, ids = scores.topk(2, dim=-1)
    for kept in (
        ids.reshape(-1),
        ids[:, 0],
        ids.sort(dim=-1).values,
        ids.clone(),
        ids.flip(1),
    ):
        known = type_of(kept)
        assert known is not None and known.index == Index(8)
    half = ids // 2
    with pytest.raises(PlacementError, match="arithmetic made this integer") as caught:
        scores.gather(1, half)
    assert caught.value.name == "half"
    told = assert_type(half, {"tp": S(0)}, index=Index(8))
    assert type_of(scores.gather(1, told)) == {"tp": S(0)}


def test_an_index_of_other_rows_is_refused() -> None:
    scores, other = of(S(0), 6, 8), of(S(0), 6, 5)
    _, ids = other.topk(2, dim=-1)
    with pytest.raises(PlacementError, match="other rows"):
        scores.gather(1, ids)
