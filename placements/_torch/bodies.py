"""The bodies of torch functions in Python, so that their parts are seen one by one."""
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

_ASKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def body_of(function: Any) -> Callable[..., Any]:
    """Return the body of a torch function in Python, whose parts a mode sees one by one.

    Such a function first asks whether a mode wants the call as one. Here the answer is no.
    """
    names = {**function.__globals__, **dict.fromkeys(_ASKS, _wants_nothing)}
    if "overrides" in function.__code__.co_names:  # it asks torch.overrides by that name
        names["torch"] = _Unasked(torch)
    body = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    body.__kwdefaults__ = function.__kwdefaults__
    return body


class _Unasked:
    """A module of torch whose questions for a mode are answered with no."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name in _ASKS:
            return _wants_nothing
        found = getattr(self._module, name)
        return _Unasked(found) if found is torch.overrides else found


def _wants_nothing(*tensors: Any) -> bool:
    return False
