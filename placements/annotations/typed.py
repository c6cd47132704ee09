"""`@typed`: check a function's arguments and result against their annotations.

The wrapper checks only while `typecheck()` is on, and otherwise calls the function. What
is checked, and how it is reported, is in `checks.py`.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import (
    Annotated,
    Any,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from jaxtyping import jaxtyped  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from placements._torch import unseen
from placements.annotations.checks import Checks
from placements.annotations.on import On, Variable
from placements.annotations.saving import tell_checkpoints
from placements.annotations.stamps import stamp
from placements.runtime.state import checkers, current, others
from placements.runtime.tags import STATED, declarations, remember

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)


@overload
def typed(target: C) -> C: ...  # pyright: ignore[reportOverlappingOverload]
@overload
def typed(target: F) -> F: ...
def typed(target: Any) -> Any:
    """Check a function, a method, or the fields of a class, against annotations.

    Of a dataclass or named tuple the fields are checked when it is made; of an
    `nn.Module` annotated attributes are the types of its parameters and buffers.
    """
    if isinstance(target, type):
        return _typed_class(target)
    if isinstance(target, classmethod | staticmethod):
        method = cast(Any, target)
        return type(method)(_typed_function(method.__func__))
    if inspect.isgeneratorfunction(target) or inspect.iscoroutinefunction(target):
        raise TypeError(f"@typed cannot check {target.__name__}: it returns a generator")
    return _typed_function(target)


def _typed_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(fn)
    hints: dict[str, Any] = {}  # read at the first call: names may be defined later

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not checkers.count or current.mode is None:
            if not others.count or current.other is None:
                return fn(*args, **kwargs)
        if not hints:
            hints.update(get_type_hints(fn, include_extras=True) or {"return": Any})
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return fn(*args, **kwargs)  # Python itself says what is wrong with the call
        bound.apply_defaults()
        owner = bound.arguments.get("self")
        if isinstance(owner, nn.Module):
            stamp(owner)
        if current.mode is None and current.other is not None:
            return current.other.called(fn, bound, hints)
        with jaxtyped("context"):
            checks = Checks(_name(fn, owner), bound.arguments)
            with unseen():
                for name, hint in getattr(owner, STATED, {}).items():
                    checks.attribute(f"self.{name}", getattr(owner, name, None), hint)
                for name, parameter in signature.parameters.items():
                    if name in hints:
                        _check_parameter(checks, parameter, hints[name])
                checks.finish()
            result = fn(*args, **kwargs)
            with unseen():
                if "return" in hints:
                    checks.value("return", result, hints["return"])
                checks.finish()
        return result

    # Code of its own: torch.compile counts for each code how often it was compiled, and
    # gives up after a few times.
    made: Any = wrapper
    made.__code__ = made.__code__.replace(co_name=made.__name__)
    return made


def _name(fn: Callable[..., Any], owner: Any) -> str:
    name = fn.__qualname__.rpartition("<locals>.")[2]
    if isinstance(owner, nn.Module) and "." not in name:
        name = f"{type(owner).__name__}.{name}"
    return f"{fn.__module__}.{name}"


def _check_parameter(checks: "Checks", parameter: inspect.Parameter, hint: Any) -> None:
    value = checks.arguments[parameter.name]
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        for k, item in enumerate(value):
            checks.value(f"{parameter.name}[{k}]", item, hint)
    elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
        for key, item in value.items():
            checks.value(f"{parameter.name}[{key!r}]", item, hint)
    elif value is not parameter.default or not _is_left_out(value):
        checks.value(parameter.name, value, hint)


def _is_left_out(value: Any) -> bool:
    """Return whether a default of None makes an argument optional: `x: Tensor = None`."""
    return value is None


def _typed_class(cls: Any) -> Any:
    """Check the fields after every construction; remember a module's parameters."""
    original = cls.__init__
    is_module = issubclass(cls, nn.Module)
    if issubclass(cls, tuple):
        return _typed_named_tuple(cls)
    if not is_module and not hasattr(cls, "__dataclass_fields__"):
        raise TypeError(
            f"@typed checks dataclasses, named tuples and nn.Modules, got {cls.__name__}; "
            "put @typed above @dataclass, or on the methods"
        )

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if is_module:
            _remember_parameters(cls, self)
        elif type(self) is cls and checkers.count and current.mode is not None:
            fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            _check_fields(cls, fields, self)

    cls.__init__ = init
    if is_module and "forward" in cls.__dict__:
        cls.forward = _typed_function(cls.forward)
    return cls


def _typed_named_tuple(cls: Any) -> Any:
    original = cls.__new__

    @functools.wraps(original)
    def new(kind: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(kind, *args, **kwargs)
        if checkers.count and current.mode is not None:
            _check_fields(cls, made._asdict(), made)
        return made

    cls.__new__ = new
    return cls


def _check_fields(cls: Any, fields: dict[str, Any], owner: Any) -> None:
    hints = get_type_hints(cls, include_extras=True)
    with jaxtyped("context"), unseen():
        checks = Checks(f"{cls.__module__}.{cls.__qualname__}", {"self": owner, **fields})
        for name, value in fields.items():
            if name in hints:
                checks.value(name, value, hints[name])
        checks.finish()


def _remember_parameters(cls: Any, module: nn.Module) -> None:
    stated: dict[str, Any] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        on = next((m for m in get_args(hint)[1:] if isinstance(m, On)), None)
        if get_origin(hint) is not Annotated or on is None:
            continue
        patterns = on.patterns({"self": module})
        types = {a: t for a, t in patterns.items() if not isinstance(t, Variable)}
        stated[name] = get_args(hint)[0]
        if isinstance(getattr(module, name, None), Tensor):
            if not declarations(module):
                tell_checkpoints(module)
            remember(module, name, types)
    setattr(cls, STATED, stated)
