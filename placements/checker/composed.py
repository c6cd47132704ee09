"""Functions of torch in Python that are made of known ops: each part is judged."""

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from placements._torch import body_of
from placements.inference.numbers import numbers_in
from placements.runtime import tags
from placements.runtime.describe import described
from placements.runtime.errors import refused_call


class _Again(TorchFunctionMode):
    """The mode of a block, once more: torch leaves a mode while it handles a call."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.mode.__torch_function__(func, types, args, kwargs)


# What such a function raises if it does not like its arguments.
_COMPLAINTS = (RuntimeError, IndexError, ValueError, ZeroDivisionError)


def looked_into(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of the function inside the mode."""
    try:
        with _Again(mode):
            return body_of(func)(*args, **kwargs)
    except _COMPLAINTS as error:
        given = (*args, *kwargs.values())
        tensors = [x for x in given if isinstance(x, Tensor)]
        known = [tags.get(x) for x in tensors]
        cut = any(t.letter in "SV" for k in known if k is not None for t in k.types)
        of_ranks = cut or next(numbers_in(given), None) is not None
        if error.__class__ not in _COMPLAINTS or not of_ranks:
            raise
        raise refused_call(
            func.__name__,
            f"torch does not take these pieces: {error}",
            rule="the sizes of a piece are not those of the whole",
            operands=[described(x, k) for x, k in zip(tensors, known, strict=True)],
        ) from error
