"""What jaxtyping's annotations say of a tensor: its dims and its dtypes."""

import functools
import types as python_types
from collections.abc import Callable
from typing import Any, Union, cast, get_args, get_origin

from jaxtyping import AbstractArray
from torch import Tensor

from placements.describe import dtype_name

UNIONS = (Union, python_types.UnionType)

# What to write for a dtype, the likeliest first. None rounds: that is for the user to say.
CASTS = (
    ("float32", "float()"),
    ("float64", "double()"),
    ("bfloat16", "bfloat16()"),
    ("float16", "half()"),
)


def is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def arrays_in(hint: Any) -> tuple[Any, ...]:
    """The jaxtyping annotations in a hint: one, or those of a union."""
    options = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    return tuple(filter(is_array, options))


@functools.lru_cache(maxsize=4096)
def stated_dtypes(hint: Any) -> list[str] | None:
    """The names of the dtypes that a hint allows; None: any."""
    found: list[str] = []
    for array in arrays_in(hint):
        names: Any = array.dtypes
        if not isinstance(names, tuple):
            return None
        found += [name for name in cast(tuple[Any, ...], names) if isinstance(name, str)]
    return found or None


def kind_of(hint: Any) -> str:
    """`Float`, `Int`: what the annotations call their dtypes."""
    return " or ".join(dict.fromkeys(array.dtype.__name__ for array in arrays_in(hint)))


def shape_reason(value: Tensor, hint: Any) -> str:
    """Why a tensor of a stated dtype does not fit; empty if it does."""
    reason = ""
    for array in arrays_in(hint):
        names = stated_dtypes(array)
        if names is None or dtype_name(value) in names:
            check: Callable[[Any], str] = array.__instancecheck_str__  # pyright: ignore
            reason = check(value)
            if not reason:
                break
    return reason
