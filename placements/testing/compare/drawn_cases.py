"""What `assert_spmd_equivalent` draws: meshes, sizes, placements that fit, and values."""

import itertools
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from placements.annotations.on import Variable
from placements.testing.compare.case import TypedValue
from placements.testing.draw.arguments import Argument, axes_of, checked_type, declared_in
from placements.testing.draw.parameter_sizes import (
    ParameterSizes,
    annotated_dims,
    parameter_sizes,
)
from placements.testing.strategies import extents, numbers, seeded
from placements.types.axis import AxisType, I, P, R, Shard, TypesLike
from placements.types.extents import Even, Padded

Values = Callable[[tuple[int, ...], torch.Generator], Tensor]

# A value of more elements is written as the call that draws it.
_WRITTEN_OUT = 100


@dataclass(frozen=True)
class Case:
    """A mesh, and a global value and type for every argument, parameter and buffer.

    `state` names the parameters and buffers among the inputs, `given` the arguments that
    the user's own function drew.
    """

    mesh: dict[str, int]
    inputs: dict[str, TypedValue]
    seed: int
    state: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()

    def says_something(self) -> bool:
        """Return whether ranks could differ from one device."""
        ranks = math.prod(self.mesh.values())
        return ranks > 1 and all(value.numel() for value, _ in self.inputs.values())

    def size(self) -> tuple[int, int]:
        elements = sum(value.numel() for value, _ in self.inputs.values())
        return math.prod(self.mesh.values()), elements

    def code(self, fn: Callable[..., Any], reference: Callable[..., Any]) -> str:
        """Return the case as code that runs; weights are taken from the reference."""
        lines = [
            f"    {name!r}: ({self._value(name, value)}, {_source(types)}),"
            for name, (value, types) in self.inputs.items()
        ]
        written = " ".join(
            repr(t) for _, types in self.inputs.values() for t in types.values()
        )
        names = sorted(set(re.findall(r"[A-Z]\w*", written)))
        text = "\n".join(lines)
        no_numbers = sorted(set(re.findall(r"\b(?:inf|nan)\b", text)))
        head = ["# the smallest case found:"]
        if self.state:
            head += ["# parameters and buffers: the values that the reference has"]
        if no_numbers:
            head += [f"from math import {', '.join(no_numbers)}"]
        head += ["import torch", f"from placements import {', '.join(names)}"]
        head += ["from placements.testing import check_spmd_case"]
        if "drawn_value(" in text:
            head += ["from placements.testing.compare.drawn_cases import drawn_value"]
        return "\n".join(
            [
                *head,
                _import(fn, "fn"),
                _import(reference, "reference"),
                *(["held = {**dict(reference.named_parameters()),"] if self.state else []),
                *(["        **dict(reference.named_buffers())}"] if self.state else []),
                "check_spmd_case(fn, reference, {",
                *lines,
                f"}}, mesh={self.mesh}, seed={self.seed})",
            ]
        )

    def _value(self, name: str, value: Tensor) -> str:
        """Return code for a value: its numbers, where it is found, or how it is drawn."""
        shape = tuple(value.shape)
        if name in self.state:
            return f"held[{name!r}].detach().to({value.dtype}).reshape({shape})"
        if value.numel() > _WRITTEN_OUT and name not in self.given:
            return f"drawn_value({name!r}, {shape}, {value.dtype}, seed={self.seed})"
        numbers = cast(Any, value).tolist()
        return f"torch.tensor({numbers}, dtype={value.dtype}).reshape({shape})"


def _source(types: TypesLike) -> str:
    return "{" + ", ".join(f"{axis!r}: {t!r}" for axis, t in types.items()) + "}"


def _import(target: Any, name: str) -> str:
    """Return the line that imports the target; a comment if it has no name in a file."""
    home, known = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if home != "__main__" and getattr(sys.modules.get(home or ""), known, None) is target:
        return f"from {home} import {known} as {name}"
    return f"# {name} = the {known or type(target).__name__} that was passed: set it here"


@dataclass(frozen=True)
class _OnMesh:
    """A mesh, what a module holds there, and how annotated dims of that are cut."""

    sizes: dict[str, int]
    state: dict[str, TypedValue]
    cuts: "dict[_CutKey, AxisType]"


# A dim's letter and size, and the axis that cuts it.
_CutKey = tuple[str, int, str]


@dataclass(frozen=True)
class CaseSpace:
    """All that cases are drawn from."""

    arguments: Sequence[Argument]
    meshes: Sequence[_OnMesh]
    sizes: Mapping[str, Sequence[int]]
    values: Mapping[str, Values]

    def options(self, variable: Variable) -> list[AxisType]:
        """Return what a placement variable may be for all arguments that it stands in."""
        users = [a for a in self.arguments if variable in a.on.values()]
        summed = [P] if all(a.dtype is not torch.bool for a in users) else []
        return [R, I, *summed, *map(Shard, range(min(len(a.dims) for a in users)))]


def case_space(
    fn: Callable[..., Any],
    reference: Callable[..., Any],
    arguments: list[Argument],
    sizes: Mapping[str, int | Sequence[int]],
    values: Mapping[str, Values],
    max_ranks: int,
    max_size: int,
) -> CaseSpace:
    """Return what cases are drawn from; ValueError if nothing can be drawn."""
    held = _held(fn, reference, arguments)
    of_parameters = parameter_sizes(fn, {n: h[0].shape for n, h in held.items()})
    return CaseSpace(
        arguments,
        _meshes(fn, held, arguments, max_ranks),
        _sizes(arguments, sizes, max_size, of_parameters),
        _values(arguments, values),
    )


def _meshes(
    fn: Callable[..., Any],
    held: Mapping[str, TypedValue],
    arguments: list[Argument],
    max_ranks: int,
) -> list[_OnMesh]:
    """Return the meshes, up to so many ranks, that parameters and extents fit."""
    axes = axes_of(fn, arguments)
    dims = annotated_dims(fn)
    found: list[_OnMesh] = []
    misfit: ValueError | None = None
    for ranks in itertools.product(range(1, max_ranks + 1), repeat=len(axes)):
        if math.prod(ranks) > max_ranks:
            continue
        mesh = dict(zip(axes, ranks, strict=True))
        try:
            for argument in arguments:
                for axis, t in argument.on.items():
                    if isinstance(t, Shard) and t.extent is not None:
                        t.extent.over(mesh[axis])
            state = {n: _placed(n, *h, mesh) for n, h in held.items()}
            found.append(_OnMesh(mesh, state, _cuts(state, dims)))
        except ValueError as error:
            misfit = misfit or error
    found.sort(key=lambda one: math.prod(one.sizes.values()))
    if not found or math.prod(found[-1].sizes.values()) == 1:
        raise ValueError(f"no mesh of 2 to {max_ranks} ranks fits: {misfit}")
    return found


def _held(
    fn: Callable[..., Any], reference: Callable[..., Any], arguments: Sequence[Argument]
) -> dict[str, TypedValue]:
    """Return the reference's parameters and buffers with their declared types."""
    if not isinstance(fn, nn.Module):
        return {}
    if not isinstance(reference, nn.Module):
        raise ValueError("the reference of a module is a module with equal names")
    said = declared_in(fn)
    names = [n for n, _ in fn.named_parameters()]
    names += [n for n, _ in fn.named_buffers() if n in said]
    parameters = dict(reference.named_parameters())
    whole: dict[str, Tensor] = {**parameters, **dict(reference.named_buffers())}
    for owner, alone in (
        ("module", [n for n in names if n not in whole]),
        ("reference", [n for n in parameters if n not in names]),
    ):
        if alone:
            raise ValueError(f"only the {owner} has {alone[0]!r}; their names must agree")
    undeclared = [n for n in names if n not in said]
    if undeclared:
        raise ValueError(
            f"parameter {undeclared[0]!r} has no declared placement: "
            f"declare(module, {{{undeclared[0]!r}: {{'tp': R}}}})"
        )
    floats = [a.dtype for a in arguments if a.dtype.is_floating_point]
    dtype = floats[0] if floats else torch.float64
    return {
        n: (whole[n].detach().to(dtype if whole[n].is_floating_point() else None), said[n])
        for n in names
    }


def _placed(
    name: str, value: Tensor, said: TypesLike, mesh: Mapping[str, int]
) -> TypedValue:
    """Return a parameter; a Shard without an extent is even, as `declare` reads it."""
    rows: dict[int, int | None] = dict(enumerate(value.shape))
    types: dict[str, AxisType] = {}
    for axis, like in {**said, **{a: R for a in mesh if a not in said}}.items():
        t = checked_type(f"parameter {name!r}", axis, like, value.dim())
        if isinstance(t, Shard):
            left = rows[t.dim]
            if t.extent is None and left is not None:
                if left % mesh[axis]:
                    raise ValueError(
                        f"parameter {name!r} is {t!r} on {axis!r}, but {mesh[axis]} ranks "
                        f"cannot cut {left} rows evenly: declare S({t.dim}, Padded({left}))"
                    )
                t = Shard(t.dim, Even(left).over(mesh[axis]))
                rows[t.dim] = left // mesh[axis]
            else:
                rows[t.dim] = None  # pieces of several sizes
        types[axis] = t
    return value, types


def _cuts(
    state: Mapping[str, TypedValue], dims: Mapping[str, Sequence[str]]
) -> dict[_CutKey, AxisType]:
    """Return how the annotated dims of a module's own parameters are cut."""
    cuts: dict[_CutKey, AxisType] = {}
    for name, (value, types) in state.items():
        letters = dims.get(name, ()) if "." not in name else ()
        for axis, t in types.items():
            if isinstance(t, Shard) and t.extent is not None and t.dim < len(letters):
                if t.extent.total == value.shape[t.dim]:  # the outermost cut
                    key = letters[t.dim], value.shape[t.dim], axis
                    cuts.setdefault(key, Shard(0, t.extent))
    return cuts


def _sizes(
    arguments: Sequence[Argument],
    said: Mapping[str, int | Sequence[int]],
    max_size: int,
    of_parameters: ParameterSizes,
) -> dict[str, list[int]]:
    """Return the sizes that each dim may have, the simplest first, 0 seldom."""
    names = list(dict.fromkeys(d for a in arguments for d in a.dims if not d.isdigit()))
    unknown = [name for name in said if name not in names]
    if unknown:
        raise ValueError(f"sizes: no dim {unknown[0]!r}; the annotations have {names}")
    fixed: dict[str, int] = {}
    for argument in arguments:
        for dim, size in argument.fixed_sizes().items():
            if fixed.setdefault(dim, size) != size:
                raise ValueError(f"argument {argument.name!r}: {dim} is {fixed[dim]} too")
    found: dict[str, list[int]] = {}
    for name in names:
        # even ones more often: many functions take equal pieces only
        usual = [*range(1, max_size + 1)] * 2 + [*range(2, max_size + 1, 2), 0]
        if name not in said or name in of_parameters.own:
            size = of_parameters.of(name)
            if size is not None and fixed.setdefault(name, size) != size:
                raise ValueError(
                    f"an extent says that {name!r} is {fixed[name]}, and a parameter "
                    f"that it is {size}"
                )
        options = said.get(name, fixed.get(name, usual))
        found[name] = [options] if isinstance(options, int) else list(options)
        if not found[name] or min(found[name]) < 0:
            raise ValueError(f"sizes: {name!r} needs sizes of at least 0, got {options}")
        if name in fixed and found[name] != [fixed[name]]:
            who = "a parameter" if name in of_parameters.own else "an extent"
            raise ValueError(f"sizes: {who} says that {name!r} is {fixed[name]}")
    return found


def _values(
    arguments: Sequence[Argument], said: Mapping[str, Values]
) -> Mapping[str, Values]:
    names = [argument.name for argument in arguments]
    unknown = [name for name in said if name not in names]
    if unknown:
        raise ValueError(f"values: no tensor argument {unknown[0]!r}; there are {names}")
    return said


@st.composite
def cases(draw: st.DrawFn, space: CaseSpace) -> Case:
    mesh = draw(st.sampled_from(space.meshes))
    dims: dict[str, int] = {}
    bound: dict[Variable, AxisType] = {}
    cuts = dict(mesh.cuts)
    seed = draw(st.integers(0, 2**16))
    inputs: dict[str, TypedValue] = {}
    for argument in space.arguments:
        if argument.optional and draw(st.booleans()):
            continue
        for dim in argument.dims:
            if dim not in dims:
                options = space.sizes.get(dim) or [int(dim)]
                dims[dim] = draw(st.sampled_from(options))
        shape = tuple(dims[dim] for dim in argument.dims)
        types: dict[str, AxisType] = {}
        # in the order of the annotation, which is the order of the cuts
        for axis in [*argument.on, *(a for a in mesh.sizes if a not in argument.on)]:
            pattern = argument.on.get(axis, R)
            if isinstance(pattern, Variable):
                if pattern not in bound:
                    bound[pattern] = draw(st.sampled_from(space.options(pattern)))
                pattern = bound[pattern]
            types[axis] = _cut(
                draw, pattern, shape, mesh.sizes[axis], types, argument, axis, cuts
            )
        inputs[argument.name] = _drawn(argument, shape, seed, space.values), types
    given = frozenset(space.values)
    return Case(mesh.sizes, {**inputs, **mesh.state}, seed, frozenset(mesh.state), given)


def _drawn(
    argument: Argument, shape: tuple[int, ...], seed: int, values: Mapping[str, Values]
) -> Tensor:
    if argument.name not in values:
        return drawn_value(argument.name, shape, argument.dtype, seed=seed)
    value = values[argument.name](shape, seeded(seed, argument.name))
    if tuple(value.shape) != shape:
        raise ValueError(
            f"values[{argument.name!r}] returned shape {tuple(value.shape)}, "
            f"asked for {shape}"
        )
    return value.to(argument.dtype)


def drawn_value(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, *, seed: int
) -> Tensor:
    """Return the value of an argument in the case of that seed; printed cases call it."""
    generator = seeded(seed, name)
    if dtype.is_floating_point or dtype is torch.bool:
        return numbers(shape, generator, dtype)
    return torch.randint(0, 4, shape, generator=generator, dtype=dtype)


def _cut(
    draw: st.DrawFn,
    pattern: AxisType,
    shape: tuple[int, ...],
    ranks: int,
    before: Mapping[str, AxisType],
    argument: Argument,
    axis: str,
    cuts: dict[_CutKey, AxisType],
) -> AxisType:
    """Return a Shard with an extent; dims of one name are cut alike."""
    if not isinstance(pattern, Shard) or pattern.extent is not None:
        return pattern
    dim = pattern.dim
    if any(isinstance(t, Shard) and t.dim == dim for t in before.values()):
        return pattern  # an inner cut: like torch.chunk of each outer piece
    key = (argument.dims[dim], shape[dim], axis)
    if key not in cuts:
        like_chunk = Padded(shape[dim]).over(ranks)  # as often as all the others
        any_cut = extents(total=shape[dim], ranks=ranks)
        cuts[key] = Shard(0, draw(st.one_of(st.just(like_chunk), any_cut)))
    known = cuts[key]
    assert isinstance(known, Shard)
    return Shard(dim, known.extent)
