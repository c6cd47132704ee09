"""Refuse code that replaces a buffer or a declared parameter of a module.

Checkpointers and optimizers hold the tensor that was registered. After
`self.bias = self.bias + step` they keep the old tensor, and nothing else shows that. So
the state of a module is written in place while checking is on.
"""

import os
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

from placements._torch import held_by
from placements.runtime.errors import refused_call
from placements.runtime.state import current
from placements.runtime.tags import declarations

_TORCH = str(Path(torch.__file__).parent) + os.sep  # not torchtitan


# The methods of torch that call the hook; whoever called them replaces the state.
_WAYS = tuple(
    method.__code__
    for method in (
        nn.Module.__setattr__,
        nn.Module.register_buffer,
        nn.Module.register_parameter,
    )
)


def check_registration(module: nn.Module, name: str, value: object) -> None:
    """Refuse to replace a buffer or a declared parameter: a hook of nn.Module."""
    if current.mode is not None and isinstance(value, Tensor):
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame.f_code in _WAYS and frame.f_back is not None:
            frame = frame.f_back
        _check(module, name, value, frame)


def _check(module: nn.Module, name: str, value: Tensor, frame: FrameType) -> None:
    buffer, parameter = held_by(module, name)
    held = buffer if buffer is not None else parameter
    # torch takes a buffer away before it puts a Parameter there; what was None stays.
    is_first = held is None and hasattr(module, name)
    if held is value or is_first:
        return
    if buffer is None and name not in declarations(module):
        return
    # torch replaces state for good reasons (loading, conversion, FSDP) and tells whoever
    # holds it. Nobody holds the state of a module that is still being made.
    if frame.f_code.co_filename.startswith(_TORCH) or _is_being_made(module, frame):
        return
    kind = "buffer" if parameter is None else "parameter"
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
