"""Find code of the user's by its path, and tell in one line what it raises."""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import placements
from placements import UnsupportedTorchError
from placements.testing.ranks.failures import SourceLine, shown_line
from spmd_moe import checks
from spmd_moe.checks.errors import BadInput

_STANDARD = sysconfig.get_path("stdlib") + os.sep
_NOT_OWN = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (placements.__file__, torch.__file__, checks.__file__)
)


@contextmanager
def blamed(name: str, about: Any, *passing: type[Exception]) -> Generator[None]:
    """Raise BadInput of `--module name` for what is raised inside, but for `passing`.

    A torch that is not supported is nobody's input, so its error passes too.
    `about` is the class or function to point at if no line of the user's raised.
    """
    try:
        yield
    except (BadInput, UnsupportedTorchError, *passing):
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {_message(error)}".removesuffix(": ")
        where = _line_of(error) or _line_of_source(about)
        place = f" ({shown_line(where)})" if where is not None else ""
        raise BadInput(f"--module {name}: {text}{place}; --debug shows all") from error


def find_class(name: str) -> type[nn.Module]:
    """Find `package.module.Class` or `package.module.Outer.Inner`."""
    *path, leaf = name.replace(":", ".").split(".")
    if not path or not all([*path, leaf]):
        raise BadInput(f"--module {name}: write it as package.Class")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with blamed(name, None):
        found: Any = _import(name, path)
    for part in [*path[found.__name__.count(".") + 1 :], leaf]:
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise BadInput(
            f"--module {name}: {'.'.join(path)} has no nn.Module of the name {leaf!r}"
        )
    return found


def _import(name: str, path: list[str]) -> Any:
    """Import the longest part of the path that is a module; classes may follow it."""
    for end in range(len(path), 0, -1):
        module = ".".join(path[:end])
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not f"{module}.".startswith(f"{missing}."):
                raise  # something that the module itself imports
            if "." not in missing:
                raise BadInput(
                    f"--module {name}: {error}; run it where {missing} can be imported"
                ) from None
    raise AssertionError(path)


def _message(error: BaseException) -> str:
    return (error.msg if isinstance(error, SyntaxError) else str(error)).strip()


def _line_of(error: BaseException) -> SourceLine | None:
    """Return the innermost line outside the standard library, torch and these packages."""
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno or 0
    walked = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return next(filter(_is_own, reversed(walked)), None)


def _is_own(line: SourceLine) -> bool:
    file = line[0]
    standard = file.startswith(_STANDARD) and "site-packages" not in file
    return not (standard or file.startswith((*_NOT_OWN, "<")))


def _line_of_source(about: Any) -> SourceLine | None:
    try:
        return inspect.getsourcefile(about) or "", inspect.getsourcelines(about)[1]
    except (OSError, TypeError):
        return None
