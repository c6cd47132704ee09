"""Functions of torch in Python that are made of known ops: each part is judged."""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.overrides import TorchFunctionMode

from placements._torch import body_of
from placements.checker.refusals import COMPLAINTS, refuse_pieces
from placements.inference.numbers import RANK_NUMBERS
from placements.runtime.errors import refused_call

# What losses took before `reduction`; torch does not say that they are flags.
_OLD_FLAGS = ("size_average", "reduce")


class _Again(TorchFunctionMode):
    """The mode of a block, once more: torch leaves a mode while it handles a call."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.mode.__torch_function__(func, types, args, kwargs)


def _refuse_flags(func: Any, args: Any, kwargs: Any) -> None:
    """Refuse a number that belongs to an axis as a flag: ranks would do other things."""
    for name, value in _bound(body_of(func), args, kwargs):
        if value.__class__ in RANK_NUMBERS:
            raise refused_call(
                func.__name__,
                f"{name}={value.facts.origin} is a flag, expected True or False",
                rule="a number that belongs to an axis may differ by rank, and then each "
                "rank would do something else",
                advice=f"{func.__name__} with the flag and without it, and torch.where",
            )


def _bound(body: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arguments in slots for flags; torch complains of others itself."""
    slots = _slots(body)
    given = dict(zip(slots, args, strict=False)) | kwargs
    for name, is_flag in slots.items():
        if is_flag and name in given:
            yield name, given[name]


@cache
def _slots(body: Any) -> dict[str, bool]:
    """Return the slots of a function, and which of them are flags."""
    slots = inspect.signature(body).parameters.items()
    return {
        name: name in _OLD_FLAGS or "bool" in f"{slot.annotation} {type(slot.default)}"
        for name, slot in slots
    }


def looked_into(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Run the body of the function inside the mode."""
    _refuse_flags(func, args, kwargs)
    try:
        with _Again(mode):
            return body_of(func)(*args, **kwargs)
    except COMPLAINTS as error:
        refuse_pieces(error, func.__name__, (args, kwargs))
        raise
