"""Warn of a block that checked nothing, because no mesh was current in the block."""

import sys
import warnings
from typing import TypeVar

from placements.runtime.blocks import Steps
from placements.runtime.callsite import user_frame
from placements.runtime.errors import UncheckedWarning
from placements.runtime.mesh import has_mesh, sets

T = TypeVar("T")


def warned_without_a_mesh(block: str, steps: Steps[T]) -> Steps[T]:
    """Take the same steps, and warn if they end well and no mesh was ever current."""
    handled, had_mesh, sets_before = sys.exception(), has_mesh(), sets.count
    failed = False
    try:
        yield from steps
    except GeneratorExit as leaving:
        # It is raised while the error of the block, if there is one, is handled.
        failed = leaving.__context__ is not handled
    if not failed and not had_mesh and sets.count == sets_before:
        warn_user(
            f"{block} checked no placements: no mesh was current in the block. Make one "
            "current, set_current_mesh({'dp': 2, 'tp': 4}) or a DeviceMesh; a program for "
            "one device says so with set_current_mesh({})",
            UncheckedWarning,
        )


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn of something in the block that the user's code leaves now."""
    frame = user_frame()
    if frame is None:
        warnings.warn(text, category, stacklevel=2)
        return
    where, scope = frame.f_code.co_filename, frame.f_globals
    seen = scope.setdefault("__warningregistry__", {})
    name = scope.get("__name__")
    warnings.warn_explicit(text, category, where, frame.f_lineno, name, seen)
