"""Refuse code that replaces a buffer or a declared parameter of a module.

Checkpointers and optimizers hold the tensor that was registered. After
`self.bias = self.bias + step` they keep the old tensor, and nothing else shows that. So
the state of a module is written in place while checking is on.
"""

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from placements._torch import held_by
from placements.runtime.errors import refused_call
from placements.runtime.state import current
from placements.runtime.tags import declarations

_TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchtitan


def watched(original: Any) -> Any:
    """A method of nn.Module that refuses to replace a buffer or a declared parameter."""

    def method(self: nn.Module, name: str, *args: Any, **kwargs: Any) -> None:
        value = args[0] if args else kwargs.get("tensor", kwargs.get("param"))
        if current.mode is not None and isinstance(value, Tensor):
            _check(self, name, value, sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        original(self, name, *args, **kwargs)

    return method


def _check(module: nn.Module, name: str, value: Tensor, frame: FrameType) -> None:
    buffer, parameter = held_by(module, name)
    held = buffer if buffer is not None else parameter
    if held is None or held is value:
        return
    if buffer is None and name not in declarations(module):
        return
    # torch replaces state for good reasons (loading, conversion, FSDP) and tells whoever
    # holds it. Nobody holds the state of a module that is still being made.
    if frame.f_code.co_filename.startswith(_TORCH) or _is_being_made(module, frame):
        return
    kind = "parameter" if buffer is None else "buffer"
    label = f"{type(module).__name__}.{name}"
    raise refused_call(
        label,
        f"the {kind} is replaced by another tensor",
        name=name,
        expected="the registered tensor, written in place",
        actual="another tensor",
        rule="checkpointers and optimizers hold the registered tensor, and would keep the "
        "old value",
        advice=f"with torch.no_grad(): module.{name}.copy_(...) (or add_, mul_, ...)",
    )


def _is_being_made(module: nn.Module, frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            if frame.f_locals.get(code.co_varnames[0]) is module:
                return True
        frame = frame.f_back
    return False
