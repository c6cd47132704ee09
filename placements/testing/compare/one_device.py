"""Compare what ranks computed with what one device computes.

Everything that must equal one device is compared here: the cases of `check_spmd_case`, the
laws, programs that a peer refuses, the bugs, and the layer. So there is one tolerance for
each dtype, and one text that tells a difference.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Ranks sum in another order than one device, so results differ by rounding. Drawn numbers
# are small and whole: their sums are exact in every dtype, and functions of them in float64
# were never off by more than 2e-15. 1e-12 leaves room for the many terms of a layer, and a
# wrong result is off by far more.
TOLERANCE = 1e-12

# Code under test has parameters of its own, which are not whole. In these dtypes numbers
# at one lie 1e-7, 1e-3 and 8e-3 apart, and each rank rounds its own part of a sum.
_OF_LOW_DTYPES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def tolerance_of(dtype: torch.dtype) -> float:
    """Return how far code under test may be from one device in that dtype."""
    return _OF_LOW_DTYPES.get(dtype, TOLERANCE)


def difference(found: Tensor, wanted: Tensor, unit: float = 1.0) -> float:
    """Return the largest |found - wanted| / (unit + |wanted|), infinite for other shapes.

    `unit` is the size of the numbers that were added up: their sum may be smaller, and its
    rounding is not. Drawn numbers have the size one.
    """
    if found.shape != wanted.shape:
        return float("inf")
    errors = _errors(found, wanted, unit)
    return float(errors.max()) if errors.numel() else 0.0


def largest(value: Tensor) -> float:
    """Return the largest absolute value of a tensor; 0 if it has no elements."""
    return float(value.detach().abs().max()) if value.numel() else 0.0


def check_value(
    what: str,
    found: Tensor,
    wanted: Tensor,
    *,
    unit: float = 1.0,
    tolerance: float = TOLERANCE,
) -> None:
    """Raise AssertionError unless a joined value equals that of one device."""
    head = f"{what} is not that of one device: "
    if found.shape != wanted.shape:
        shapes = f"its shape is {tuple(found.shape)}, not {tuple(wanted.shape)}"
        raise AssertionError(head + shapes)
    if found.dtype != wanted.dtype:
        raise AssertionError(f"{head}its dtype is {found.dtype}, not {wanted.dtype}")
    errors = _errors(found, wanted, unit)
    if not errors.numel() or float(errors.max()) <= tolerance:
        return
    off = (found.detach().double() - wanted.detach().double()).abs()
    off = torch.where(errors > tolerance, torch.where(off.isnan(), torch.inf, off), 0.0)
    at = int(off.argmax())
    index = tuple(int(k) for k in torch.unravel_index(torch.tensor(at), off.shape))
    one, other = (x.detach().flatten()[at].item() for x in (found, wanted))
    raise AssertionError(
        f"{head}off by {float(off.max()):g}\n"
        f"{int((errors > tolerance).sum())} of {errors.numel()} elements differ, the most "
        f"at index {index}: {one!r} on ranks, {other!r} on one device\n"
        f"on ranks {shown(found)}\non one device {shown(wanted)}"
    )


def _errors(found: Tensor, wanted: Tensor, unit: float) -> Tensor:
    """Return each element's error relative to its size; not-a-numbers are equal."""
    x, y = found.detach().double(), wanted.detach().double()
    same = (found.detach() == wanted.detach()) | (x.isnan() & y.isnan())
    if not wanted.is_floating_point():  # whole numbers and truth values are equal or not
        return torch.where(same, 0.0, torch.inf)
    error = (x - y).abs() / (unit + y.abs())
    error = torch.where(error.isnan(), torch.inf, error)  # infinite on one side alone
    return torch.where(same, 0.0, error)


def shown(value: Tensor) -> str:
    """Return a small value in whole, and the shape of a large one."""
    return f"{value}" if value.numel() <= 32 else f"a tensor of {tuple(value.shape)}"


def gradients(
    results: Sequence[Tensor], cotangents: Sequence[Tensor], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the gradient of each input; None where no result depends on it.

    The graph is kept, since the same results may be compared as several types.
    """
    pairs = [(y, w) for y, w in zip(results, cotangents, strict=True) if y.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad(
            [y for y, _ in pairs], wanted, [w for _, w in pairs],
            allow_unused=True, retain_graph=True,
        )
    )  # fmt: skip
    return [next(found) if x.requires_grad else None for x in inputs]
