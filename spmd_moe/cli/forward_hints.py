"""What the annotations of a `forward` say: the tensors it takes, and what it returns."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import nn

from placements import On, typed
from placements.annotations import Variable
from placements.array_hints import is_array, stated_dtypes
from placements.testing.arguments import arguments_of
from placements.types import AxisType
from spmd_moe.cli.terminal import BadInput
from spmd_moe.cli.user_code import blamed

HOW = 'Annotated[Float[Tensor, "T D"], On(dp=S(0), tp=R)]'

# What is drawn for an annotation that allows it, the first that fits.
DRAWN = (torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)

NUMBERS = (bool, int, float, str, NoneType)  # what may be among the results


@dataclass(frozen=True)
class Asked:
    """A tensor argument: dims, types and dtype."""

    name: str
    dims: tuple[str, ...]
    on: Mapping[str, AxisType | Variable]
    dtype: torch.dtype


def plain_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    return inspect.unwrap(cls.forward)


def read_arguments(name: str, module: nn.Module) -> list[Asked]:
    """The tensor arguments; BadInput says what is missing."""
    hints = _hints(name, module)
    try:
        found = arguments_of(module)
    except ValueError as error:
        text = str(error).replace(repr(module), "forward")
        raise BadInput(f"--module {name}: {text}") from None
    asked = [
        Asked(
            one.name, one.dims, one.on, _dtype(name, one.name, get_args(hints[one.name])[0])
        )
        for one in found
    ]
    _check_others(name, module, asked)
    return asked


def axes_of_result(name: str, module: nn.Module) -> set[str]:
    """The axes on which every tensor of the result is annotated."""
    cls = type(module)
    if not _is_typed(cls.forward):
        raise BadInput(
            f"--module {name}: nothing checks the annotations of its forward; put @typed "
            f"on {cls.__name__}"
        )
    hints = _hints(name, module)
    if "return" not in hints:
        raise BadInput(
            f"--module {name}: forward does not say what it returns, so a reduction that "
            f"is missing would not be seen; annotate it: -> {HOW}"
        )
    said: list[set[str]] = []
    for leaf, marks in _leaves(hints["return"]):
        if marks:
            said.append({a for on in marks for a in on.patterns({"self": module})})
        elif leaf is Any or (isinstance(leaf, type) and leaf not in NUMBERS):
            shown = getattr(leaf, "__name__", leaf)
            raise BadInput(
                f"--module {name}: forward returns {shown} without On(...); write -> "
                f"{HOW}, or a tuple, list or dict of it"
            )
    return set[str].intersection(*said) if said else set()


def check_result(name: str, module: nn.Module, axes: Mapping[str, int]) -> None:
    """BadInput for an axis of which the annotation of a result says nothing."""
    said = axes_of_result(name, module)
    for axis, size in axes.items():
        if size > 1 and axis not in said:
            raise BadInput(
                f"--module {name}: forward does not say what it returns on mesh axis "
                f"{axis!r}; add it to the On(...) of the result, {axis}=R if all ranks "
                "have it"
            )


def _hints(name: str, module: nn.Module) -> dict[str, Any]:
    plain = plain_forward(type(module))
    with blamed(name, plain):
        return get_type_hints(plain, include_extras=True)


def _dtype(name: str, argument: str, hint: Any) -> torch.dtype:
    if not is_array(hint):
        raise BadInput(f"--module {name}: {argument} has no dims; write it as {HOW}")
    stated = stated_dtypes(hint)
    for dtype in DRAWN:
        if stated is None or str(dtype).removeprefix("torch.") in stated:
            return dtype
    raise BadInput(
        f"--module {name}: {argument} must be {' or '.join(stated or ())}, but values are "
        "drawn in float64, as integers or as truth values; annotate it as Float, Int or "
        "Bool"
    )


def _check_others(name: str, module: nn.Module, asked: list[Asked]) -> None:
    known = {"self", *(one.name for one in asked)}
    for one in inspect.signature(plain_forward(type(module))).parameters.values():
        needed = one.default is inspect.Parameter.empty
        variadic = one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if needed and not variadic and one.name not in known:
            raise BadInput(
                f"--module {name}: forward needs {one.name!r}, which is not annotated as a "
                f"tensor; write {one.name}: {HOW}, or give it a default"
            )


def _is_typed(fn: Any) -> bool:
    """Whether `@typed` is among the decorators."""
    while fn is not None:
        if (
            getattr(fn, "__code__", typed.__code__).co_filename
            == typed.__code__.co_filename
        ):
            return True
        fn = getattr(fn, "__wrapped__", None)
    return False


def _leaves(hint: Any) -> Iterator[tuple[Any, list[On]]]:
    """The parts of a hint that is no tuple, list, dict or union, with what marks them."""
    if get_origin(hint) is Annotated:
        yield hint, [mark for mark in get_args(hint)[1:] if isinstance(mark, On)]
    elif hasattr(hint, "_fields") and _is_typed(hint.__new__):  # a named tuple
        for field in get_type_hints(hint, include_extras=True).values():
            yield from _leaves(field)
    elif is_array(hint) or not get_args(hint):
        yield hint, []
    else:
        for part in get_args(hint):
            yield from _leaves(part)
