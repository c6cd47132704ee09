"""The checks of one call: values against annotations, all failures reported together.

jaxtyping checks shapes and dtypes, `On` placements, and beartype everything that is not a
tensor. A placement variable is bound by the first argument that it annotates.
"""

import functools
import types as python_types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Union, cast, get_args, get_origin

import torch
from jaxtyping import AbstractArray
from torch import Tensor

from placements.annotations.on import On, PadRows, Variable
from placements.collectives.pending import Pending
from placements.inference.fixes import Fix, change
from placements.runtime import tags
from placements.runtime.describe import dtype_name, printed
from placements.runtime.errors import refused
from placements.runtime.mesh import checked_mesh, unknown_axis_here
from placements.runtime.state import observer
from placements.types.axis import AxisType, I, Shard
from placements.types.padding import print_pads
from placements.types.tensor import TensorType


@dataclass(frozen=True)
class Misfit:
    """One argument that does not fit, in the words of the headline."""

    name: str
    text: str
    expected: str = ""
    actual: str = ""
    axis: str | None = None
    fix: Fix | None = None


class Checks:
    """The checks of one call: placement variables are bound once, failures collected."""

    def __init__(self, where: str, arguments: Mapping[str, Any]) -> None:
        self.where = where
        self.arguments = arguments
        self.variables: dict[str, tuple[AxisType, str]] = {}
        self.waiting: list[tuple[str, TensorType, int, str, Variable]] = []
        self.failures: list[Misfit] = []
        self.tensors: list[_Seen] = []  # printed only if something fails
        self.crossed: list[tuple[str, Tensor, TensorType]] = []

    def value(self, name: str, value: Any, hint: Any) -> None:
        """Check one value, tensors inside it included."""
        if not _mentions_tensor(hint):
            self._plain(name, value, hint)
            return
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            ons = [m for m in args[1:] if isinstance(m, On)]
            self._tensor(name, value, args[0], ons, PadRows in args[1:])
        elif origin in UNIONS and not all(map(is_array, args)):
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
        tried: list[list[Misfit]] = []
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

    def _tensor(
        self, name: str, value: Any, hint: Any, ons: Sequence[On], padded: bool = False
    ) -> None:
        if not isinstance(value, Tensor):
            waits = ": call its wait() first" if isinstance(value, Pending) else ""
            self._fail(name, f"is {type(value).__name__}, expected a tensor{waits}")
            return
        known = tags.get(value)
        self.tensors.append(_Seen(name, value.shape, value.dtype, hint, known))
        if self._dtype(name, value, hint):
            reason = shape_reason(value, hint)
            if reason:
                self._fail(name, f"does not fit its shape: {reason}")
        mesh = checked_mesh()
        for on in ons:
            wrong = unknown_axis_here(mesh, on.patterns(self.arguments))
            if wrong is not None:
                self._fail(name, f"cannot be checked: its annotation {wrong}")
        if known is None:
            if mesh.axes:
                self._fail(
                    name,
                    f"has no placement, expected {ons[0] if ons else 'one'}; "
                    f"declare it with assert_type",
                )
            return
        self.crossed.append((name, value, known))
        if known.pads and not padded:
            said = print_pads(known.pads).removeprefix(", ")
            self._fail(
                name,
                f"has {said}, expected no rows of padding; leave them out ({name}[valid], "
                f"{name}[:n]), or annotate it with PadRows",
                "no rows of padding",
                said,
            )
        for on in ons:
            patterns = on.patterns(self.arguments)
            for axis, pattern in patterns.items():
                self._axis(name, known, value.dim(), axis, pattern)
            said = [axis for axis, t in patterns.items() if isinstance(t, Shard)]
            for axes in known.cut_dims.values():
                inside, outside = (
                    [a for a in said if a in axes],
                    [a for a in axes if a in said],
                )
                if inside != outside:
                    text = f"is cut over {outside}, outermost first, expected {inside}"
                    self._fail(name, text, str(inside), str(outside), axes[0])

    def attribute(self, name: str, value: Any, hint: Any) -> None:
        """Check the dtype of a parameter or buffer against its class annotation."""
        if isinstance(value, Tensor) and not self._dtype(name, value, hint):
            known = tags.get(value)
            self.tensors.append(_Seen(name, value.shape, value.dtype, hint, known))

    def _dtype(self, name: str, value: Tensor, hint: Any) -> bool:
        """Return whether the tensor has a dtype that the hint states; a failure if not."""
        stated, actual = stated_dtypes(hint), dtype_name(value)
        if stated is None or actual in stated:
            return True
        expected = " or ".join(stated) if len(stated) < 3 else dtypes_in_words(hint)
        call = next((call for known, call in CASTS if known in stated), None)
        fix = Fix(f"{name}.{call}", "nothing", "nothing") if call else None
        self._fail(name, f"is {actual}, expected {expected}", expected, actual, fix=fix)
        return False

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
                if known.is_also(axis, I):
                    # A constant goes with several types, so it waits for another to bind.
                    self.waiting.append((name, known, ndim, axis, pattern))
                else:
                    self.variables[pattern.name] = actual, name
                return
            expected, first = self.variables[pattern.name]
            source = f" ({pattern.name!r}, bound by {first})"
        else:
            expected = pattern
        if isinstance(expected, Shard) and expected.dim < 0:
            expected = Shard(expected.dim % ndim, expected.extent)
        if actual != expected and not known.is_also(axis, expected):
            self._fail(
                name,
                f"is {actual!r} on axis {axis!r}, expected {expected!r}{source}",
                repr(expected),
                repr(actual),
                axis,
                change(name, axis, actual, expected),
            )

    def _fail(self, name: str, text: str, *details: Any, **named: Any) -> None:
        self.failures.append(Misfit(name, text, *details, **named))

    def finish(self) -> None:
        """Raise one error for all failures, or else tell the listener of the values."""
        waiting, self.waiting = self.waiting, []
        for constant in waiting:
            self._axis(*constant)
        if not self.failures:
            watcher = observer()
            for name, value, known in self.crossed if watcher is not None else ():
                assert watcher is not None
                watcher.crossing(self.where, name, value, known)
            self.crossed.clear()
            return
        first = self.failures[0]
        texts = [f"{failure.name} {failure.text}" for failure in self.failures]
        raise refused(
            self.where,
            f"\n{self.where}: ".join(texts),
            name=first.name,
            axis=first.axis,
            expected=first.expected,
            actual=first.actual,
            rule="the annotation of the signature",
            operands=list(map(str, self.tensors)),
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


class _Seen(NamedTuple):
    """What an error says of a tensor that was looked at, as it was then."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    hint: Any
    known: TensorType | None

    def __str__(self) -> str:
        words = str(next((a.dim_str for a in arrays_in(self.hint)), "")).split()
        fit = len(words) == len(self.shape) and all(word.isidentifier() for word in words)
        dtype = str(self.dtype).removeprefix("torch.")
        told = printed(tuple(self.shape), dtype, self.known, words if fit else ())
        return f"{self.name} {told}"


UNIONS = (Union, python_types.UnionType)

# The cast to suggest for a dtype, the likeliest first. No cast that rounds is suggested.
CASTS = (
    ("float32", "float()"),
    ("float64", "double()"),
    ("bfloat16", "bfloat16()"),
    ("float16", "half()"),
)


def is_array(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def arrays_in(hint: Any) -> tuple[Any, ...]:
    """Return the jaxtyping annotations in a hint: one, or those of a union."""
    options = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    return tuple(filter(is_array, options))


@functools.lru_cache(maxsize=4096)
def stated_dtypes(hint: Any) -> list[str] | None:
    """Return the names of the dtypes that a hint allows; None: any."""
    found: list[str] = []
    for array in arrays_in(hint):
        names: Any = array.dtypes
        if not isinstance(names, tuple):
            return None
        found += [name for name in cast(tuple[Any, ...], names) if isinstance(name, str)]
    return found or None


def dtypes_in_words(hint: Any) -> str:
    """`Float`, `Int`: what the annotations call their dtypes."""
    return " or ".join(dict.fromkeys(array.dtype.__name__ for array in arrays_in(hint)))


def shape_reason(value: Tensor, hint: Any) -> str:
    """Return why a tensor of a stated dtype does not fit; empty if it does."""
    reason = ""
    for array in arrays_in(hint):
        names = stated_dtypes(array)
        if names is None or dtype_name(value) in names:
            check: Callable[[Any], str] = array.__instancecheck_str__  # pyright: ignore
            reason = check(value)
            if not reason:
                break
    return reason
