"""Try a fix: inference must take the changed operands, and torch the changed pieces."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from placements.inference.fixes import Infer
from placements.inference.op import Op
from placements.inference.terms import Operand


def tried(
    op: Op,
    infer: Infer,
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    operands: Sequence[Operand],
) -> Infer:
    """Inference that asks torch, too, unless torch would crash."""
    return infer if op.needs_memory else _Trial(infer, func, args, kwargs, operands)


class _Trial:
    """Infers a call with other operands, and then runs it on tensors without memory.

    Some calls cannot run without values. For such a call inference alone decides.
    """

    def __init__(
        self,
        infer: Infer,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Sequence[Operand],
    ) -> None:
        self._infer, self._func = infer, func
        self._args, self._kwargs = args, kwargs
        self._operands = list(operands)

    @cached_property
    def _runs(self) -> bool:
        return self._is_taken(self._operands)

    def __call__(self, operands: Sequence[Operand]) -> object:
        found = self._infer(operands)
        if self._runs and not self._is_taken(operands):
            raise ValueError("torch does not take these pieces")
        return found

    def _is_taken(self, operands: Sequence[Operand]) -> bool:
        left = iter(operands)

        def empty(value: Any) -> Any:
            if isinstance(value, Tensor):
                return torch.empty(next(left).shape, dtype=value.dtype, device="meta")
            if isinstance(value, list | tuple):
                items = [empty(item) for item in cast(Any, value)]
                return items if isinstance(value, list) else tuple(items)
            if isinstance(value, slice):
                bounds = cast(Any, value)
                return slice(empty(bounds.start), empty(bounds.stop), empty(bounds.step))
            return value

        args = [empty(arg) for arg in self._args]
        kwargs = {name: empty(arg) for name, arg in self._kwargs.items()}
        try:
            with warnings.catch_warnings(action="ignore"):
                self._func(*args, **kwargs)
        except Exception:  # a trial that fails must not hide the refusal
            return False
        return True
