"""The dtypes in which a transition computes and sends, and of its result.

If a call names no dtype, a sum is computed in the wider one of its input's and its result's
dtypes, so that it is rounded no more than the result has to be. Values that only move
travel in the narrower of the two, which loses nothing. A gradient arrives with the dtype of
the result and leaves with that of the input, so the `op_dtype` of the forward does not
narrow it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch

from placements.runtime.scopes import HeldAtOnce, Scoped


class BackwardOptions(TypedDict, total=False):
    """The dtypes of a call's backward, and, nested, of the backward of that backward."""

    op_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    backward_options: "BackwardOptions | None"


@dataclass(frozen=True)
class Dtypes:
    """`op`: the dtype to compute and send in; `out`: that of the result; None: not said."""

    op: torch.dtype | None = None
    out: torch.dtype | None = None
    backward: "Dtypes | None" = None

    def chosen(self, given: torch.dtype, *, sums: bool) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes to work in and to give, for a tensor of dtype `given`."""
        out = self.out or self.op or given
        if self.op is not None:
            return self.op, out
        if sums:
            if out.is_floating_point and not (given.is_floating_point or given.is_complex):
                return torch.int64, out  # exact, where a float would round or overflow
            return torch.promote_types(given, out), out
        return min(given, out, key=lambda dtype: dtype.itemsize), out


NOTHING_SAID = Dtypes()


def said_dtypes(
    call: str,
    given: torch.dtype,
    op_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None = None,
    backward_options: BackwardOptions | None = None,
) -> Dtypes:
    """Return the options of a call on a tensor of dtype `given`, checked."""
    out = _castable(call, "op_dtype", given, op_dtype)
    out = _castable(call, "out_dtype", out, out_dtype)
    if backward_options is None:
        return Dtypes(op_dtype, out_dtype) if op_dtype or out_dtype else NOTHING_SAID
    options = cast(Mapping[str, Any], backward_options)
    unknown = sorted(set(options) - set(BackwardOptions.__annotations__))
    if unknown:
        known = ", ".join(BackwardOptions.__annotations__)
        raise ValueError(
            f"{call}: backward_options has no {unknown[0]!r}; it takes {known}"
        )
    # The gradient that comes in has the dtype of the output.
    backward = said_dtypes(f"backward of {call}", out, **{"op_dtype": None, **options})
    return Dtypes(op_dtype, out_dtype, backward)


def _castable(
    call: str, argument: str, given: torch.dtype, wanted: torch.dtype | None
) -> torch.dtype:
    if wanted is None:
        return given
    if not isinstance(wanted, torch.dtype):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{call}: {argument} must be a torch.dtype, got {wanted!r}")
    if _kind(given) > _kind(wanted):
        raise ValueError(
            f"{call}: {argument}={wanted} cannot hold what {given} does, and the sum of "
            "rounded values is not the rounded sum; cast the tensor before the call if "
            "that is meant"
        )
    return wanted


def _kind(dtype: torch.dtype) -> int:
    """Return which values a dtype can hold: truth, whole numbers, real, complex."""
    # As torch.can_cast has it, which torch.compile cannot trace.
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


# axis -> the dtype in which gradients are summed over it; None: over every other axis
_Policy = dict[str | None, torch.dtype]
_policy: Scoped[_Policy] = Scoped("placements_gradient_dtype", {})


class set_gradient_dtype(HeldAtOnce[_Policy]):  # noqa: N801 - reads as the verb it is
    """Sum gradients over ranks in `dtype`: at once, and until the `with` block ends.

    A dtype is for every axis. A mapping such as `{"dp": torch.float32}` is for the axes
    that it names, and the other axes keep what was set outside the block. With None, which
    is the default, each gradient is summed in its own dtype. The setting holds for the
    backward of calls that are made in the block, unless a call has `backward_options`, and
    for `reduce_gradients`.
    """

    of = _policy

    def __init__(self, dtype: torch.dtype | Mapping[str, torch.dtype] | None) -> None:
        super().__init__(dtype)

    @staticmethod
    def read(dtype: torch.dtype | Mapping[str, torch.dtype] | None) -> _Policy:  # pyright: ignore[reportIncompatibleMethodOverride]
        policy: _Policy = {}
        if isinstance(dtype, Mapping):
            policy = {**_policy.get(), **dtype}
        elif dtype is not None:
            policy = {None: dtype}
        for axis, one in policy.items():
            if not isinstance(one, torch.dtype) or not one.is_floating_point:  # pyright: ignore[reportUnnecessaryIsInstance]
                where = "" if axis is None else f" for axis {axis!r}"
                raise ValueError(
                    f"set_gradient_dtype takes a floating-point dtype such as "
                    f"torch.float32, or a mapping of axes to them; got {one!r}{where}"
                )
        return policy


def gradient_dtype(axis: str) -> torch.dtype | None:
    """Return the dtype in which gradients are summed over `axis`; None: their own."""
    policy = _policy.get()
    return policy.get(axis, policy.get(None))
