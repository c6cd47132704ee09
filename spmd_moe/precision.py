"""Where autocast must be off, and where this package must apply it itself.

`torch.autocast` has every matrix product computed in its narrow dtype, also one whose
operands were widened on purpose. So what chooses experts or weighs them computes in
`wide_dtype`, and says `without_autocast`. On the other hand autocast knows nothing of
operators that are not torch's own: these ask `autocast_dtype` in which dtype torch would
compute.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives `x` in a matrix product; None if it is off.

    As torch has it, float64 and integers are left alone.
    """
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    if not x.is_floating_point() or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Compute products on the device of `x` inside in the dtype of their operands."""
    if autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that loses nothing of any of `tensors`, and float32 at least."""
    wide = torch.float32
    for tensor in tensors:
        wide = torch.promote_types(wide, tensor.dtype)
    return wide
