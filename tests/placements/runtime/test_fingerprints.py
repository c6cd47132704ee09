"""Fingerprints tell tensors apart, but not by rounding."""

import pytest
import torch
from torch import Tensor

from placements.runtime.fingerprints import Fingerprint, project


def fingerprint(x: Tensor, rtol: float | None = None) -> Fingerprint:
    return Fingerprint.of(tuple(x.shape), x.dtype, project(x).tolist(), rtol)


@pytest.mark.parametrize("size", [1, 100, 20_000, 50_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_fingerprints_tell_tensors_apart_but_not_by_rounding(
    size: int, dtype: torch.dtype
) -> None:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    assert fingerprint(x).agrees(fingerprint(x.clone()))
    near = x * (1 + torch.finfo(dtype).eps)
    assert fingerprint(x).agrees(fingerprint(near))
    assert not fingerprint(x).agrees(fingerprint(x * 1.1))
    if size > 1:
        assert not fingerprint(x).agrees(fingerprint(x.roll(1)))
        assert not fingerprint(x).agrees(fingerprint(x.flip(0)))


def test_fingerprints_of_other_dtypes_and_of_no_elements() -> None:
    rows = torch.arange(1000)
    assert fingerprint(rows).agrees(fingerprint(rows.clone()))
    moved = rows.clone()
    moved[3], moved[4] = 4, 3
    assert not fingerprint(rows).agrees(fingerprint(moved))
    assert not fingerprint(rows).agrees(fingerprint(rows.int()))
    assert not fingerprint(rows).agrees(fingerprint(rows.view(10, 100)))
    assert fingerprint(rows > 3).agrees(fingerprint(rows > 3))
    assert fingerprint(torch.zeros(0, 3)).agrees(fingerprint(torch.zeros(0, 3)))
    assert fingerprint(torch.zeros(())).agrees(fingerprint(torch.zeros(())))
    nan, inf = torch.tensor([float("nan")]), torch.tensor([float("inf")])
    assert fingerprint(nan).agrees(fingerprint(nan))
    assert not fingerprint(nan).agrees(fingerprint(torch.zeros(1)))
    assert not fingerprint(nan).agrees(fingerprint(inf))
    square = torch.randn(300, 300, generator=torch.Generator().manual_seed(0))
    assert not fingerprint(square).agrees(fingerprint(square.t().contiguous()))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("size", [3, 20_000])
def test_what_is_not_finite_hides_nothing(special: float, size: int) -> None:
    x = torch.ones(size)
    x[1] = special
    assert fingerprint(x).agrees(fingerprint(x.clone()))
    assert fingerprint(x).agrees(fingerprint(x * (1 + 1e-7)))
    for k, other in [(0, 2.0), (1, 1.0), (1, 0.0), (2, special), (2, -special)]:
        changed = x.clone()
        changed[k] = other
        assert not fingerprint(x).agrees(fingerprint(changed)), (k, other)
    infinite = torch.tensor([float("inf")])
    assert not fingerprint(infinite).agrees(fingerprint(-infinite))


def test_whole_numbers_are_compared_exactly() -> None:
    for size in (1, 20_000, 50_001):
        x = torch.full((size,), 2**60)
        for k in {0, size - 1}:
            changed = x.clone()
            changed[k] += 1
            assert not fingerprint(x, rtol=0.1).agrees(fingerprint(changed, rtol=0.1))
    assert not fingerprint(torch.tensor([True])).agrees(fingerprint(torch.tensor([False])))


def test_large_numbers_are_told_apart() -> None:
    x = torch.full((3,), 1e30)
    assert fingerprint(x).agrees(fingerprint(x.clone()))
    assert not fingerprint(x).agrees(fingerprint(2 * x))
