"""Read the annotations of a `forward`: the tensors that it takes, and what it returns."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
from torch import nn

from placements import On, typed
from placements.annotations.checks import is_array
from placements.testing.draw.arguments import Argument, arguments_of
from placements.testing.ranks.failures import SourceLine
from spmd_moe.checks.errors import BadInput
from spmd_moe.checks.module.user_code import blamed

HOW = 'Annotated[Float[Tensor, "T D"], On(dp=S(0), tp=R)]'

# A module is made float64, so other floats do not go with its parameters.
DRAWN = (torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)

NUMBERS = (bool, int, float, str, NoneType)  # what may be among the results


def plain_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    return inspect.unwrap(cls.forward)


def line_of_forward(cls: type[nn.Module]) -> SourceLine:
    code = plain_forward(cls).__code__
    return code.co_filename, code.co_firstlineno


def calls_forward(cls: type[nn.Module], names: Sequence[str]) -> Callable[..., Any]:
    """Make a function that calls a module with such weights and arguments.

    Errors name the line and the variables of whoever calls a typed function. Here that is
    nobody's code, so the call stands in the line where the user's `forward` begins, and
    has its names.
    """
    file, line = line_of_forward(cls)
    parameters = inspect.signature(plain_forward(cls)).parameters
    first = [n for n in names if parameters[n].kind is inspect.Parameter.POSITIONAL_ONLY]
    rest = [n for n in names if n not in first]
    given = "".join(f", {name}" for name in names)
    by_order = "".join(f"{name}, " for name in first)
    by_name = ", ".join(f"{name!r}: {name}" for name in rest)
    source = "\n" * (line - 1) + (
        f"def forward(self, _weights{given}): "
        f"return _call(self, _weights, ({by_order}), {{{by_name}}})"
    )
    scope: dict[str, Any] = {"_call": torch.func.functional_call}
    exec(compile(source, file, "exec"), scope)
    return scope["forward"]


def read_arguments(name: str, module: nn.Module) -> list[Argument]:
    """Return the tensor arguments; BadInput says what is missing."""
    with blamed(name, plain_forward(type(module))):
        try:
            found = arguments_of(module)
        except ValueError as error:
            text = str(error).replace(repr(module), "forward")
            raise BadInput(f"--module {name}: {text}") from None
    for one in found:
        if one.dtype not in DRAWN:
            raise BadInput(
                f"--module {name}: {one.name} must be {str(one.dtype)[6:]}, but values are "
                "drawn in float64, as integers or as truth values; annotate it as Float, "
                "Int or Bool"
            )
    return found


def axes_of_result(name: str, module: nn.Module) -> set[str]:
    """Return the axes on which every tensor of the result is annotated."""
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
    """Raise BadInput for an axis of which the annotation of a result says nothing."""
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


def _is_typed(fn: Any) -> bool:
    """Return whether `@typed` is among the decorators."""
    while fn is not None:
        if (
            getattr(fn, "__code__", typed.__code__).co_filename
            == typed.__code__.co_filename
        ):
            return True
        fn = getattr(fn, "__wrapped__", None)
    return False


def _leaves(hint: Any) -> Iterator[tuple[Any, list[On]]]:
    """Yield the parts of a tuple, list, dict or union of hints, with their `On` marks."""
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
