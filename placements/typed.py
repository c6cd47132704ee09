"""`@typed`: check a function's arguments and result against their annotations.

Shapes and dtypes by jaxtyping, placements by `On`, everything that is not a tensor by
beartype. Only while `typecheck()` is on; otherwise the wrapper calls straight through.
"""

import dataclasses
import functools
import inspect
import types as python_types
from collections.abc import Callable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from jaxtyping import AbstractArray, jaxtyped  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn

from placements import tags
from placements.annotations import On, Variable
from placements.declarations import remember, stamp
from placements.describe import checked_mesh, dtype_name, short_dtype
from placements.errors import Fix, PlacementError
from placements.state import checkers, current, observer
from placements.suggest import change
from placements.tensor_type import TensorType
from placements.torch_private import unseen
from placements.types import AxisType, Described, Shard

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
    return _typed_class(target) if isinstance(target, type) else _typed_function(target)


def _typed_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(fn)
    hints: dict[str, Any] = {}  # read at the first call: names may be defined later

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not checkers.count or current.mode is None:
            return fn(*args, **kwargs)
        if not hints:
            hints.update(get_type_hints(fn, include_extras=True) or {"return": Any})
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        owner = bound.arguments.get("self")
        if isinstance(owner, nn.Module):
            stamp(owner)
        with jaxtyped("context"):
            checks = _Checks(_name(fn, owner), bound.arguments)
            with unseen():
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

    return wrapper


def _name(fn: Callable[..., Any], owner: Any) -> str:
    name = fn.__qualname__.rpartition("<locals>.")[2]
    if isinstance(owner, nn.Module) and "." not in name:
        name = f"{type(owner).__name__}.{name}"
    return f"{fn.__module__}.{name}"


def _check_parameter(checks: "_Checks", parameter: inspect.Parameter, hint: Any) -> None:
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
    """`x: Tensor = None` says optional without saying so."""
    return value is None


def _typed_class(cls: Any) -> Any:
    """Check the fields after every construction; remember a module's parameters."""
    original = cls.__init__
    is_module = issubclass(cls, nn.Module)
    if issubclass(cls, tuple):
        return _typed_named_tuple(cls)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is not cls:
            return
        if is_module:
            _remember_parameters(cls, self)
        elif checkers.count and current.mode is not None:
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
        checks = _Checks(f"{cls.__module__}.{cls.__qualname__}", {"self": owner, **fields})
        for name, value in fields.items():
            if name in hints:
                checks.value(name, value, hints[name])
        checks.finish()


def _remember_parameters(cls: Any, module: nn.Module) -> None:
    for name, hint in get_type_hints(cls, include_extras=True).items():
        on = next((m for m in get_args(hint)[1:] if isinstance(m, On)), None)
        if get_origin(hint) is not Annotated or on is None:
            continue
        patterns = on.patterns({"self": module})
        types = {a: t for a, t in patterns.items() if not isinstance(t, Variable)}
        if isinstance(getattr(module, name, None), Tensor):
            remember(module, name, types)


@dataclasses.dataclass(frozen=True)
class _Failure:
    """One argument that does not fit, in the words of the headline."""

    name: str
    text: str
    axis: str | None = None
    expected: str = ""
    actual: str = ""
    fix: Fix | None = None


class _Checks:
    """The checks of one call: placement variables are bound once, failures collected."""

    def __init__(self, where: str, arguments: Mapping[str, Any]) -> None:
        self.where = where
        self.arguments = arguments
        self.variables: dict[str, tuple[AxisType, str]] = {}
        self.failures: list[_Failure] = []
        self.tensors: list[str] = []
        self.crossed: list[tuple[str, Tensor, TensorType]] = []

    def value(self, name: str, value: Any, hint: Any) -> None:
        """Check one value, tensors inside it included."""
        if not _mentions_tensor(hint):
            self._plain(name, value, hint)
            return
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            self._tensor(name, value, args[0], [m for m in args[1:] if isinstance(m, On)])
        elif origin in (Union, python_types.UnionType):
            self._union(name, value, args)
        elif origin in (tuple, list, Sequence, dict, Mapping):
            self._container(name, value, origin, args)
        elif isinstance(hint, type) and not issubclass(hint, Tensor | AbstractArray):
            self._plain(name, value, hint)  # a class of its own checks its own fields
        else:
            self._tensor(name, value, hint, [])

    def _union(self, name: str, value: Any, options: tuple[Any, ...]) -> None:
        if value is None and type(None) in options:
            return
        tensors = [o for o in options if _mentions_tensor(o)]
        others = [o for o in options if not _mentions_tensor(o) and o is not type(None)]
        if not isinstance(value, Tensor) and others:
            self._plain(name, value, Union[tuple(others)])  # noqa: UP007
            return
        before = self.failures
        tried: list[list[_Failure]] = []
        for option in tensors:
            self.failures = []
            self.value(name, value, option)
            tried.append(self.failures)
            if not self.failures:
                break
        self.failures = before + (tried[-1] if tried[-1] else [])

    def _container(self, name: str, value: Any, origin: Any, args: Any) -> None:
        kinds: dict[Any, Any] = {Sequence: (tuple, list), Mapping: dict}
        kind = kinds.get(origin, origin)
        if not isinstance(value, kind):
            self._fail(name, f"is {type(value).__name__}, expected {origin.__name__}")
        elif kind is dict:
            for key, item in value.items():
                self.value(f"{name}[{key!r}]", item, args[1])
        elif origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
            if len(value) != len(args):
                self._fail(name, f"has {len(value)} entries, expected {len(args)}")
                return
            for k, (item, hint) in enumerate(zip(value, args, strict=True)):
                self.value(f"{name}[{k}]", item, hint)
        else:
            for k, item in enumerate(value):
                self.value(f"{name}[{k}]", item, args[0])

    def _plain(self, name: str, value: Any, hint: Any) -> None:
        from beartype.door import is_bearable  # imported late: it costs 0.1 s

        if not is_bearable(value, hint):
            shown = getattr(hint, "__name__", None) or str(hint)
            self._fail(name, f"is {value!r}, expected {shown}", str(hint), repr(value))

    def _tensor(self, name: str, value: Any, hint: Any, ons: Sequence[On]) -> None:
        if not isinstance(value, Tensor):
            self._fail(name, f"is {type(value).__name__}, expected a tensor")
            return
        known = tags.get(value)
        self.tensors.append(f"{name} {_printed(value, hint, known)}")
        reason = _shape_reason(value, hint)
        if reason:
            self._fail(name, f"does not fit its shape: {reason}")
        mesh = checked_mesh()
        if known is None:
            if mesh.axes:
                self._fail(
                    name,
                    f"has no placement, expected {ons[0] if ons else 'one'}; "
                    f"declare it with assert_type",
                )
            return
        self.crossed.append((name, value, known))
        for on in ons:
            for axis, pattern in on.patterns(self.arguments).items():
                self._axis(name, known, value.dim(), axis, pattern)

    def _axis(
        self,
        name: str,
        known: TensorType,
        ndim: int,
        axis: str,
        pattern: AxisType | Variable,
    ) -> None:
        if axis not in known:
            if checked_mesh().sizes.get(axis, 1) > 1:
                text = f"lives on {known.mesh!r}, which has no axis {axis!r}; use "
                self._fail(name, text + "reinterpret_mesh", axis=axis)
            return
        actual = known[axis]
        source = ""
        if isinstance(pattern, Variable):
            if pattern.name not in self.variables:
                self.variables[pattern.name] = actual, name
                return
            expected, first = self.variables[pattern.name]
            source = f" ({pattern.name!r}, bound by {first})"
        else:
            expected = pattern
        if isinstance(expected, Shard) and expected.dim < 0:
            expected = Shard(expected.dim % ndim, expected.extent)
        if actual != expected and not known.is_number:
            self._fail(
                name,
                f"is {actual!r} on axis {axis!r}, expected {expected!r}{source}",
                repr(expected),
                repr(actual),
                axis,
                change(name, axis, actual, expected),
            )

    def _fail(
        self,
        name: str,
        text: str,
        expected: str = "",
        actual: str = "",
        axis: str | None = None,
        fix: Fix | None = None,
    ) -> None:
        self.failures.append(_Failure(name, text, axis, expected, actual, fix))

    def finish(self) -> None:
        """Raise one error for all that failed; else tell who watches values."""
        if not self.failures:
            watcher = observer()
            for name, value, known in self.crossed if watcher is not None else ():
                assert watcher is not None
                watcher.crossing(self.where, name, value, known)
            self.crossed.clear()
            return
        first = self.failures[0]
        texts = [f"{failure.name} {failure.text}" for failure in self.failures]
        headline = f"{self.where}: {texts[0]}"
        if len(texts) > 1:
            headline += "".join(f"\n{self.where}: {text}" for text in texts[1:])
        raise PlacementError(
            headline,
            where=self.where,
            name=first.name,
            axis=first.axis,
            expected=first.expected,
            actual=first.actual,
            rule="the annotation of the signature",
            operands=self.tensors,
            fixes=[failure.fix for failure in self.failures if failure.fix],
        )


@functools.lru_cache(maxsize=4096)
def _mentions_tensor_cached(hint: Any) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, Tensor | AbstractArray)
    return any(_mentions_tensor(arg) for arg in get_args(hint))


def _mentions_tensor(hint: Any) -> bool:
    try:
        return _mentions_tensor_cached(hint)
    except TypeError:  # an unhashable hint
        return any(_mentions_tensor(arg) for arg in get_args(hint))


def _shape_reason(value: Tensor, hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        check: Callable[[Any], str] = hint.__instancecheck_str__  # pyright: ignore
        return check(value)
    return ""


def _printed(value: Tensor, hint: Any, known: TensorType | None) -> str:
    names: list[str | None] = [None] * value.dim()
    words = str(getattr(hint, "dim_str", "")).split()
    if len(words) == value.dim() and all(w.isidentifier() for w in words):
        names = list(words)
    dtype = short_dtype(dtype_name(value))
    text = str(Described(dtype, tuple(value.shape), tuple(names), known or {}))
    return text if known is not None else text.removesuffix("{}") + " untyped"
