"""Compares numbers: equal up to the rounding of their dtype, and of what was summed."""

from collections.abc import Mapping

import torch
from torch import Tensor

from placements.testing.forms.operands import Place, join_value
from placements.types.axis import AxisType, P

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def same(
    value: Tensor,
    expected: Tensor,
    summed: Tensor | None = None,
    computed_in: torch.dtype | None = None,
) -> bool:
    """Return whether two tensors hold the same, up to the rounding of their dtype.

    `computed_in` is the dtype of the computation; the coarser of the two counts.
    `summed` is the sum of the magnitudes of a Partial's summands. They may cancel, so the
    rounding is theirs, and where one of them is not finite their sum says nothing.
    """
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return False
    if value.is_complex():
        value, expected = (torch.view_as_real(x.resolve_conj()) for x in (value, expected))
        summed = None if summed is None else summed.unsqueeze(-1)
    if not value.is_floating_point():
        return torch.equal(value, expected)
    dtypes = (value.dtype, computed_in or value.dtype)
    tolerance = max(_TOLERANCE.get(dtype, 5e-2) for dtype in dtypes)
    if summed is not None:
        finite = summed[summed.isfinite()]
        largest = float(finite.max()) if finite.numel() and tolerance > 1e-6 else 0.0
        off = (value - expected).abs() > tolerance * (1 + summed.clamp(min=largest / 100))
        return not bool((off & summed.isfinite()).any())
    # Where elements of very different size are mixed, the rounding is that of the largest.
    finite = expected[expected.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    absolute = tolerance if tolerance < 1e-6 else tolerance * max(1.0, largest / 100)
    return torch.allclose(value, expected, rtol=tolerance, atol=absolute, equal_nan=True)


def magnitudes(
    held: Mapping[Place, Tensor], types: Mapping[str, AxisType], sizes: Mapping[str, int]
) -> dict[Place, Tensor]:
    """By place on Varying axes, the sums of magnitudes of what is Partial; else nothing."""
    if P not in types.values() or not next(iter(held.values())).is_floating_point():
        return {}
    return join_value({rank: x.abs() for rank, x in held.items()}, types, sizes)


def show(x: Tensor) -> str:
    text = str([number.item() for number in x.detach().flatten()[:6]])
    kind = str(x.dtype).removeprefix("torch.")
    return f"{kind}{list(x.shape)} {text}"
