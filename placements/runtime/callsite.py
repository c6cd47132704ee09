"""Where in the user's code a call came from, and what its tensors are called there."""

import inspect
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from placements.runtime.source import (
    arguments_in_code,
    first_argument_in_code,
    name_in_code,
)

# The separator at the end keeps out torchtitan, which is a program and not torch.
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple(f"{d}{os.sep}" for d in (_PACKAGE, Path(torch.__file__).parent))
_PASSED_OVER = ("contextlib.py", "threading.py", "_decorator.py", "typing_extensions.py")
# Where torch starts backward, and where it calls a Function's own backward.
_ENGINE = os.path.join("autograd", "graph.py")
_FUNCTION = os.path.join("autograd", "function.py")
# The demo is a program like the user's.
_DEMO = str(_PACKAGE / "demo.py")


def is_library(file: str) -> bool:
    """Return whether a file belongs to this package or to torch."""
    return file.startswith(_LIBRARIES) and file != _DEMO


def user_frame() -> FrameType | None:
    """Return the innermost frame that belongs neither to this package nor to torch."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(_LIBRARIES) or name.endswith(_PASSED_OVER)
        if name == _DEMO or not ours:
            return frame
        frame = frame.f_back
    return None


def frames() -> Iterator[FrameType]:
    """Yield the frames of this thread, the innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def outermost_frame(file: str, functions: Container[str]) -> FrameType | None:
    """Return the outermost frame of one of the functions in a file whose path ends so."""
    found = None
    for frame in frames():
        code = frame.f_code
        if code.co_name in functions and code.co_filename.endswith(file):
            found = frame
    return found


def in_hook_of_user() -> bool:
    """Return whether this code runs in a hook of the user's that backward called.

    The backward of a Function is no such hook, and neither is a hook of torch (FSDP).
    """
    users = False
    for frame in frames():
        name = frame.f_code.co_filename
        if name.endswith(_ENGINE):
            return users
        if name.endswith(_FUNCTION):
            return False
        users = users or not (name.startswith(_LIBRARIES) or name.endswith(_PASSED_OVER))
    return False


def locals_in_hook() -> list[object]:
    """Return the values of all locals of the user's frames between here and backward."""
    found: list[object] = []
    for frame in frames():
        if frame.f_code.co_filename.endswith(_ENGINE):
            break
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            found.extend(frame.f_locals.values())
    return found


def caller() -> str:
    """Return file:line of the user's call."""
    frame = user_frame()
    if frame is None:
        return "?"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def located(call: str) -> str:
    """`call at file:line`: a call of the user's, and where the user's code makes it."""
    return f"{call} at {caller()}"


def name_of(tensor: Tensor, call: str = "") -> str | None:
    """Return what the user's frame calls this tensor: a name, an attribute, an item.

    If it has none there and is the first argument of `call`, the expression that made it.
    """
    frame = user_frame()
    if frame is None:
        return None
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in scope.items():
            if value is tensor and name.isidentifier():  # not a name that pytest makes
                return name
    owner = frame.f_locals.get("self")
    if isinstance(owner, torch.nn.Module):
        registered = [*owner.named_parameters(), *owner.named_buffers()]
        for name, value in [*registered, *vars(owner).items()]:
            if value is tensor:
                return f"self.{name}"
    found = name_in_code(frame, tensor)
    return found or (first_argument_in_code(frame, call) if call else None)


def parameter_name(parameter: Tensor) -> str | None:
    """Return the name of a parameter in a module that the user's frame, or self, holds."""
    frame = user_frame()
    if frame is None:
        return None
    held = list(frame.f_locals.items())
    held += list(getattr(frame.f_locals.get("self"), "__dict__", {}).items())
    for _, module in held:
        if isinstance(module, torch.nn.Module):
            for name, value in module.named_parameters():
                if value is parameter:
                    return name
    return None


def names_in_call(
    call: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[[object], str | None]:
    """value -> what the user's line calls it: a name, or the expression that made it."""
    frame = user_frame()

    def named(value: object) -> str | None:
        known = name_of(value) if isinstance(value, Tensor) else None
        if known is not None or frame is None:
            return known
        written = arguments_in_code(frame, call, args, kwargs)
        return next((text for held, text in written if held is value), None)

    return named
