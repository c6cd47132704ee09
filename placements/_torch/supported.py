"""The versions of torch that were tested, and the error about any other one."""

import importlib
from typing import Any

import torch

# The versions that were tested; `docs/versions.md` says what ran on each, with counts.
TESTED = ("2.13.0", "2.14.1", "2.15.0")


class UnsupportedTorchError(RuntimeError):
    """The installed torch lacks something that this project stands on."""


def unsupported(missing: list[str]) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} is not supported. What this project needs of it is not "
        f"there or behaves differently: {'; '.join(missing)}. The tested versions are "
        f"{', '.join(TESTED)}: install one of them, for example "
        f"`pip install torch=={TESTED[-1]}`"
    )


def inside(path: str) -> Any:
    """Return the object of torch with this dotted name, which starts with a module."""
    head, *rest = path.split(".")
    found: Any = importlib.import_module(head)
    for name in rest:
        if not hasattr(found, name):
            found = importlib.import_module(f"{found.__name__}.{name}")
        else:
            found = getattr(found, name)
    return found
