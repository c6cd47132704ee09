"""Under inference_mode torch counts no writes and knows no views: the checker does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from placements import (
    P,
    PlacementError,
    R,
    S,
    V,
    assert_type,
    axis_rank,
    reinterpret,
    set_current_mesh,
    type_of,
    typecheck,
)


def own() -> Tensor:
    return assert_type(torch.ones(4, 3), {"a": V})


def same() -> Tensor:
    return assert_type(torch.ones(4, 3), {"a": R})


def write_a_row() -> Any:
    buffer = torch.zeros(4, 3)
    buffer[0].copy_(own()[0])
    return buffer * 2


def write_a_slice() -> Any:
    buffer = torch.zeros(4, 3)
    rows = buffer[:2]
    rows.add_(axis_rank("a"))
    return buffer.sum()


def write_a_view_of_a_view() -> Any:
    buffer = torch.zeros(4, 3)
    buffer.view(-1)[:3].copy_(own()[0])
    return buffer + 1


def write_through_a_cast() -> Any:
    x = same()
    reinterpret(x, "a", src=R, dst=V).mul_(axis_rank("a"))
    return x


def write_a_part_that_a_rank_chose() -> Any:
    x = same()
    x[axis_rank("a")].mul_(axis_rank("a"))
    return x


def write_a_chunk_that_a_rank_chose() -> Any:
    x = same()
    x.chunk(2)[axis_rank("a")].zero_()
    return x


# Of a buffer that is fresh, which takes the type of its parts where torch knows its views.
IN_PARTS = [write_a_row, write_a_slice, write_a_view_of_a_view]

REFUSED = [
    write_through_a_cast,
    write_a_part_that_a_rank_chose,
    write_a_chunk_that_a_rank_chose,
]


@pytest.mark.parametrize("program", REFUSED)
@pytest.mark.parametrize("block", [torch.inference_mode, torch.no_grad])
def test_a_write_through_another_name_is_refused(
    program: Callable[[], Any], block: Any
) -> None:
    with set_current_mesh({"a": 2}), typecheck(), block():
        with pytest.raises(PlacementError):
            program()


@pytest.mark.parametrize("program", IN_PARTS)
def test_a_fresh_buffer_takes_the_type_of_its_parts_or_is_refused(
    program: Callable[[], Any],
) -> None:
    with set_current_mesh({"a": 2}), typecheck():
        with torch.no_grad():
            assert type_of(program()) == {"a": V}
        with torch.inference_mode(), pytest.raises(PlacementError):
            program()


def test_writes_that_are_right() -> None:
    with set_current_mesh({"a": 2}), typecheck(), torch.inference_mode():
        cache = assert_type(torch.zeros(2, 4), {"a": S(0)})
        cache[:, 1] = assert_type(torch.ones(2), {"a": S(0)})
        cache.mul_(2)
        assert type_of(cache) == {"a": S(0)}
        buffer = torch.zeros(3)
        buffer.add_(1)
        buffer[0] = 5.0
        assert type_of(buffer + 1) == {"a": R}
        x = same()
        x[0].mul_(2)
        assert type_of(x) == {"a": R}
        summed = assert_type(torch.ones(3), {"a": P})
        summed[:2].mul_(2)
        assert type_of(summed) == {"a": P}
