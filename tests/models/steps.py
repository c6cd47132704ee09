"""Steps of a program: which result of a rank belongs to which result of one device.

Ranks run the same lines as one device, but not always equally often: a loop over the
experts that got tokens has another length on each rank. So a step is named by the line it
stands on, the lines and modules that called it, and how many times it came there before
within the same call of these modules. Results in a loop may then be misplaced, but nothing
after the loop is.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

_TORCH = str(Path(torch.__file__).parent) + os.sep
_MODELS = str(Path(transformers.__file__).parent) + os.sep

Step = tuple[Any, ...]


class Steps:
    """Names the steps of one run, in their order."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._times: Counter[Step] = Counter()

    def name(self, op: str) -> Step:
        """Return the name of the step that runs now, which `transformers` called."""
        place: list[Any] = [op]
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(_MODELS):
                place.append((code.co_filename[len(_MODELS) :], frame.f_lineno))
                module = frame.f_locals.get("self")
                if id(module) in self._names:
                    place.append(self._names[id(module)])
            frame = frame.f_back
        step = tuple(place)
        self._times[step] += 1
        return (*step, self._times[step])


def line_of(step: Step) -> str:
    """Return file:line in `transformers` of a step."""
    for part in step[1:]:
        if isinstance(part, tuple):
            return f"{part[0]}:{part[1]}"
    return "the loss"


def line_of_error(error: BaseException) -> str:
    """Return file:line of the last line of `transformers` that an error passed."""
    found, trace = "the loss", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(_MODELS):
            found = f"{file[len(_MODELS) :]}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def op_name(func: Any) -> str:
    """Return the name of a torch function."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def tensors_of(result: Any) -> Iterator[Tensor]:
    """Yield the tensors of a result, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for one in result:
            yield from tensors_of(one)
