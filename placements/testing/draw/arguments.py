"""What the annotations of a function say of its tensor arguments: dims, dtypes, types.

What cannot be drawn is refused here, before the first case, with the argument's name.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from placements.annotations.checks import UNIONS, arrays_in, is_array, stated_dtypes
from placements.annotations.on import On, Variable
from placements.runtime.tags import declarations
from placements.types.axis import AxisType, Shard, TypesLike, V
from placements.types.text import as_axis_type

_EXAMPLE = 'Annotated[Float[Tensor, "T D"], On(tp=S(0))]'
# What is drawn where an annotation admits it, the first that fits: exact sums first.
_DTYPES = (
    "float64", "int64", "bool", "float32", "int32", "bfloat16", "float16", "int16",
    "int8", "uint8",
)  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """What an annotation says of a tensor argument."""

    name: str
    dims: tuple[str, ...]
    on: Mapping[str, AxisType | Variable]
    dtype: torch.dtype
    optional: bool  # whether it may be left out: its default is None
    by_name: bool  # whether it can be given by its name

    def fixed_sizes(self) -> dict[str, int]:
        """Return the sizes that the extents of Shards give to dims."""
        found: dict[str, int] = {}
        for t in self.on.values():
            if isinstance(t, Shard) and t.extent is not None:
                dim, total = self.dims[t.dim], t.extent.total
                if found.setdefault(dim, total) != total:
                    raise ValueError(
                        f"argument {self.name!r}: two extents for dim {dim!r}; leave them "
                        "out, the sizes of inner pieces follow from the outer cut"
                    )
                if dim.isdigit() and int(dim) != total:
                    raise ValueError(
                        f"argument {self.name!r}: {t!r} has {total} rows, the dim {dim}"
                    )
        return found


def arguments_of(fn: Callable[..., Any]) -> list[Argument]:
    """Return the tensor arguments of a `@typed` function or module; else ValueError."""
    hints = _hints(fn)
    found: list[Argument] = []
    if hints:
        known = _known(fn)
        for parameter in inspect.signature(_target(fn)).parameters.values():
            hint = hints.get(parameter.name, Any)
            if _is_drawn(parameter, hint):
                found.append(_argument(parameter, hint, known))
    if not found:
        raise ValueError(f"{fn!r} has no annotated tensor argument; write {_EXAMPLE}")
    return found


def axes_of(fn: Callable[..., Any], arguments: list[Argument]) -> list[str]:
    """Return the axes that arguments, the result, parameters and buffers name."""
    found = {axis for argument in arguments for axis in argument.on}
    known = _known(fn)
    for mark in parts_of(_hints(fn).get("return", Any)):
        if isinstance(mark, On):
            found |= mark.patterns(known).keys()
    found |= {axis for types in declared_in(fn).values() for axis in types}
    if not found:
        raise ValueError(f"{fn!r}: no annotation names an axis of the mesh: {_EXAMPLE}")
    return sorted(found)


def declared_in(fn: Callable[..., Any]) -> dict[str, TypesLike]:
    """Return the declared types of a module's parameters and buffers, by full names."""
    found: dict[str, TypesLike] = {}
    if isinstance(fn, nn.Module):
        modules: Iterator[tuple[str, nn.Module]] = cast(Any, fn).named_modules()
        for path, owner in modules:
            for leaf, types in declarations(owner).items():
                found[f"{path}.{leaf}" if path else leaf] = types
    return found


def _target(fn: Callable[..., Any]) -> Any:
    return fn.forward if isinstance(fn, nn.Module) else fn


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    plain = inspect.unwrap(_target(fn))
    return get_type_hints(plain, include_extras=True) if inspect.isroutine(plain) else {}


def _known(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return what `"{self.layout}"` and `"{layout}"` can refer to: self, and defaults."""
    target = _target(fn)
    parameters = inspect.signature(target).parameters.values()
    known = {parameter.name: parameter.default for parameter in parameters}
    return {"self": target.__self__, **known} if inspect.ismethod(target) else known


def _is_drawn(parameter: inspect.Parameter, hint: Any) -> bool:
    """Return whether it is a tensor to draw; False if it keeps its default."""
    name, kind = parameter.name, parameter.kind
    many = kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    parts = list(parts_of(hint))
    if not any(_is_tensor(part) for part in parts):
        if parameter.default is parameter.empty and not many:
            raise ValueError(
                f"argument {name!r} is no annotated tensor, so it cannot be drawn: give it "
                "a default, or pass a typed function that calls this one with a value"
            )
        return False
    if many:
        raise ValueError(
            f"argument {name!r} is {kind.description}: how many tensors is not known"
        )
    if not any(isinstance(part, On) for part in parts):
        raise ValueError(
            f"argument {name!r} is a tensor, but its annotation does not say where it is: "
            f"write {_EXAMPLE}, or On(tp=R) if all ranks hold it"
        )
    return True


def _is_tensor(part: Any) -> bool:
    return is_array(part) or (isinstance(part, type) and issubclass(part, Tensor))


def _argument(
    parameter: inspect.Parameter, hint: Any, known: Mapping[str, Any]
) -> Argument:
    name = parameter.name
    if get_origin(hint) in UNIONS:
        hint, *others = (h for h in get_args(hint) if h is not type(None))
        if others:
            raise ValueError(
                f"argument {name!r}: {hint} or {others}; only `| None` is read"
            )
    arrays = arrays_in(get_args(hint)[0]) if get_origin(hint) is Annotated else ()
    if not arrays:
        raise ValueError(
            f"argument {name!r}: {hint} cannot be drawn; it must be one tensor with its "
            f"shape and place, {_EXAMPLE}"
        )
    dims = tuple(str(arrays[0].dim_str).split())
    if any(not (d.isidentifier() or d.isdigit()) for d in dims):
        raise ValueError(f"argument {name!r}: dims {dims} must be names or numbers")
    on: dict[str, AxisType | Variable] = {}
    for mark in get_args(hint)[1:]:
        if isinstance(mark, On):
            on.update(mark.patterns(known))
    for axis, t in on.items():
        if not isinstance(t, Variable):
            on[axis] = checked_type(f"argument {name!r}", axis, t, len(dims))
    dtype = _dtype(name, arrays[0])
    by_name = parameter.kind is not parameter.POSITIONAL_ONLY
    argument = Argument(name, dims, on, dtype, parameter.default is None, by_name)
    argument.fixed_sizes()
    return argument


def checked_type(what: str, axis: str, like: Any, ndim: int) -> AxisType:
    """Return a type that gives a tensor one global value; ValueError for another."""
    t = as_axis_type(like)
    if t == V:
        raise ValueError(
            f"{what} is Varying on {axis!r}: its locals make up no global value that one "
            "device could have. Declare it R, I, P or S(dim)"
        )
    if not isinstance(t, Shard):
        return t
    if not -ndim <= t.dim < ndim:
        raise ValueError(f"{what}: {t!r} on {axis!r}, but it has {ndim} dims")
    return Shard(t.dim % ndim, t.extent)


def _dtype(name: str, array: Any) -> torch.dtype:
    admitted = stated_dtypes(array)
    for one in _DTYPES:
        if admitted is None or one in admitted:
            return cast(torch.dtype, getattr(torch, one))
    raise ValueError(f"argument {name!r}: {admitted} cannot be drawn, only {_DTYPES}")


def parts_of(hint: Any) -> Iterator[Any]:
    """Yield the hint, and all that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from parts_of(part)
