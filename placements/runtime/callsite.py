"""Where in the user's code a call came from, and what its tensors are called there."""

import inspect
import os
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

# The separator at the end keeps out torchtitan, which is a program and not torch.
_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = tuple(f"{d}{os.sep}" for d in (_PACKAGE, Path(torch.__file__).parent))
_PASSED_OVER = ("contextlib.py", "threading.py", "_decorator.py", "typing_extensions.py")
# Where torch starts backward, and where it calls a Function's own backward.
_ENGINE = os.path.join("autograd", "graph.py")
_FUNCTION = os.path.join("autograd", "function.py")
# The demo is a program like the user's.
_DEMO = str(_PACKAGE / "demo.py")


def user_frame() -> FrameType | None:
    """The innermost frame that belongs neither to this package nor to torch."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith(_LIBRARIES) or name.endswith(_PASSED_OVER)
        if name == _DEMO or not ours:
            return frame
        frame = frame.f_back
    return None


def in_hook_of_user() -> bool:
    """Whether this code runs in a hook of the user's that backward called.

    The backward of a Function is no such hook, and neither is a hook of torch (FSDP).
    """
    frame, users = inspect.currentframe(), False
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(_ENGINE):
            return users
        if name.endswith(_FUNCTION):
            return False
        users = users or not (name.startswith(_LIBRARIES) or name.endswith(_PASSED_OVER))
        frame = frame.f_back
    return False


def locals_in_hook() -> list[object]:
    """The values of all locals of the user's frames between here and backward."""
    frame, found = inspect.currentframe(), list[object]()
    while frame is not None and not frame.f_code.co_filename.endswith(_ENGINE):
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            found.extend(frame.f_locals.values())
        frame = frame.f_back
    return found


def caller() -> str:
    """file:line of the user's call."""
    frame = user_frame()
    if frame is None:
        return "?"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def located(call: str) -> str:
    """`call at file:line`: a call of the user's, and where the user's code makes it."""
    return f"{call} at {caller()}"


def name_of(tensor: Tensor) -> str | None:
    """What the user's frame calls this tensor: a local, or an attribute of `self`."""
    frame = user_frame()
    if frame is None:
        return None
    for scope in (frame.f_locals, frame.f_globals):
        for name, value in scope.items():
            if value is tensor:
                return name
    owner = frame.f_locals.get("self")
    if isinstance(owner, torch.nn.Module):
        registered = [*owner.named_parameters(), *owner.named_buffers()]
        for name, value in [*registered, *vars(owner).items()]:
            if value is tensor:
                return f"self.{name}"
    return None
