"""Where in the user's code a call came from, and what its tensors are called there."""

import inspect
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

_LIBRARIES = (str(Path(__file__).parent), str(Path(torch.__file__).parent))
_PASSED_OVER = ("contextlib.py", "threading.py", "_decorator.py")
# The demo is a program like the user's.
_DEMO = str(Path(__file__).with_name("demo.py"))


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


def caller() -> str:
    """file:line of the user's call."""
    frame = user_frame()
    if frame is None:
        return "?"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


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
        for name, value in [*owner.named_parameters(), *owner.named_buffers()]:
            if value is tensor:
                return f"self.{name}"
    return None
