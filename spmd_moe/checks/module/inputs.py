"""Build a typed module of the user's without arguments, and draw what it is fed.

    forward    tensor arguments annotated with dims and `On(...)`, the others with defaults
    weights    annotated attributes of a `@typed` class, or `declare`
    reference  optional, a staticmethod: the same on one device, called with the global
               arguments by name and `weights`, the global parameters by name

Dims that a parameter's annotation names have its size; the others have `OTHER_DIMS` rows
on every rank. An axis that an annotation leaves open is Replicate. Integers are 0 or 1.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from placements import R, Shard, declarations, set_current_mesh, unchecked
from placements.annotations.on import Variable
from placements.runtime.state import suspended
from placements.testing.draw.arguments import Argument
from placements.testing.draw.parameter_sizes import ParameterSizes, parameter_sizes
from placements.testing.draw.whole_numbers import numbers, seeded
from placements.types.text import as_axis_type
from spmd_moe.checks.errors import BadInput
from spmd_moe.checks.module.hints import (
    axes_of_result,
    calls_forward,
    check_result,
    read_arguments,
)
from spmd_moe.checks.module.user_code import blamed, find_class
from spmd_moe.checks.scale import MAX_RANKS
from spmd_moe.layouts import Types

OTHER_DIMS = 3
INTEGERS = 2  # integers are drawn below it: they may be indices of what is small

Placed = tuple[Tensor, Types]


@dataclass(frozen=True)
class OwnModule:
    """A class, a mesh, and a global value and type for every argument and parameter."""

    name: str
    cls: type[nn.Module]
    mesh: dict[str, int]
    inputs: dict[str, Placed]
    parameters: dict[str, Placed]

    @property
    def placed(self) -> dict[str, Placed]:
        """Arguments and parameters, as `forward` calls them."""
        own = {_alias(name): placed for name, placed in self.parameters.items()}
        return {**self.inputs, **own}

    def call(self, **values: Tensor) -> list[Tensor]:
        """Return the tensors that the module makes of this rank's parts of `placed`."""
        weights = {name: values.pop(_alias(name)) for name in self.parameters}
        module = _build(self.name, self.cls)
        result = calls_forward(self.cls, list(values))(module, weights, **values)
        return self._tensors("forward", result)

    @property
    def reference(self) -> Callable[..., list[Tensor]] | None:
        """The same on one device, from the global values of `placed`; None if not given."""
        target = getattr(self.cls, "reference", None)
        if target is None:
            return None

        def call(**values: Tensor) -> list[Tensor]:
            weights = {name: values.pop(_alias(name)) for name in self.parameters}
            return self._tensors("reference", target(**values, weights=weights))

        return call

    def _tensors(self, where: str, result: Any) -> list[Tensor]:
        """Return the tensors in tuples, lists and dicts, in order, without other values."""
        if isinstance(result, Tensor):
            return [result]
        if result is None or isinstance(result, bool | int | float | str):
            return []
        if isinstance(result, dict):
            result = list(cast(dict[Any, Any], result).values())
        if not isinstance(result, tuple | list):
            raise BadInput(
                f"--module {self.name}: {where} returns a {type(result).__name__}; return "
                "tensors, or tuples, lists and dicts of them"
            )
        parts = cast(list[Any], result)
        return [tensor for part in parts for tensor in self._tensors(where, part)]


def own_module(name: str, mesh: Mapping[str, int] | None) -> OwnModule:
    """Find the class of that name and draw its inputs; BadInput says what is missing."""
    cls = find_class(name)
    with blamed(name, cls):
        # Annotations may read attributes, so there is a module before there are axes.
        with set_current_mesh(dict(mesh) if mesh else None):
            module = _build(name, cls)
            asked = read_arguments(name, module)
            said = axes_of_result(name, module)
            axes = dict(mesh) if mesh else dict.fromkeys(_axes_of(asked, module, said), 2)
            _check_size(name, axes)
        with set_current_mesh(axes):
            module = _build(name, cls)
            check_result(name, module, axes)
            dims = parameter_sizes(module)
            inputs = {
                one.name: _placed(
                    name,
                    one.name,
                    _shape(name, one, dims),
                    _types(one, axes),
                    axes,
                    one.dtype,
                )
                for one in asked
            }
            parameters = {
                path: _placed(name, path, tuple(value.shape), types, axes, value.dtype)
                for path, value, types in _declared_parameters(name, module, axes)
            }
    return OwnModule(name, cls, axes, inputs, parameters)


def _alias(name: str) -> str:
    return f"self.{name}"


def _build(name: str, cls: type[nn.Module]) -> nn.Module:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise BadInput(
            f"--module {name}: {cls.__name__}() must need no arguments ({error}); give it "
            "defaults, or name a subclass that fills them in"
        ) from None
    # What is being made is not declared yet.
    with blamed(name, cls), unchecked(), suspended():
        torch.default_generator.manual_seed(0)
        return cls().double()


def _axes_of(asked: list[Argument], module: nn.Module, of_result: set[str]) -> list[str]:
    said = [axis for one in asked for axis in one.on]
    for owner in module.modules():
        said += [axis for types in declarations(owner).values() for axis in types]
    return list(dict.fromkeys([*said, *sorted(of_result)])) or ["tp"]


def _check_size(name: str, axes: Mapping[str, int]) -> None:
    ranks = math.prod(axes.values())
    if ranks > MAX_RANKS:
        said = ",".join(f"{axis}={size}" for axis, size in axes.items())
        raise BadInput(
            f"--module {name}: {said} has {ranks} ranks, and at most {MAX_RANKS} are "
            "simulated; give a smaller --mesh"
        )


def _shape(name: str, argument: Argument, dims: ParameterSizes) -> tuple[int, ...]:
    shape: list[int] = []
    for dim in argument.dims:
        try:
            size = int(dim) if dim.isdigit() else dims.of(dim)
        except ValueError as error:
            text = f"argument {argument.name!r}: {error}"
            raise BadInput(f"--module {name}: {text}") from None
        shape.append(OTHER_DIMS if size is None else size)
    return tuple(shape)


def _types(argument: Argument, axes: Mapping[str, int]) -> Types:
    said = {axis: argument.on.get(axis, R) for axis in axes}
    return {axis: R if isinstance(t, Variable) else t for axis, t in said.items()}


def _declared_parameters(
    name: str, module: nn.Module, axes: Mapping[str, int]
) -> list[tuple[str, Tensor, Types]]:
    found: list[tuple[str, Tensor, Types]] = []
    for path, value in module.named_parameters():
        owner, _, leaf = path.rpartition(".")
        said = declarations(module.get_submodule(owner)).get(leaf)
        if said is None:
            raise BadInput(
                f"--module {name}: parameter {path!r} has no declared type; annotate the "
                "attribute of a @typed class, or declare(module, {...})"
            )
        missing = [axis for axis, size in axes.items() if size > 1 and axis not in said]
        if missing:
            raise BadInput(
                f"--module {name}: parameter {path!r} is not declared on mesh axis "
                f"{missing[0]!r}; say what it is there, {missing[0]}=R if all ranks have it"
            )
        found.append((path, value, {a: as_axis_type(said.get(a, R)) for a in axes}))
    return found


def _placed(
    module: str,
    name: str,
    local: tuple[int, ...],
    types: Types,
    axes: Mapping[str, int],
    dtype: torch.dtype,
) -> Placed:
    """Draw a global value whose parts have the shape `local`."""
    shape = list(local)
    for axis, t in types.items():
        if t.letter == "V":
            raise BadInput(
                f"--module {module}: {name} is Varying on {axis!r}, so no global value "
                "says what ranks hold; name a module that makes it from other types"
            )
        if isinstance(t, Shard):
            shape[t.dim] *= axes[axis]
    generator = seeded("own module", name)
    if not dtype.is_floating_point:
        drawn = torch.randint(0, INTEGERS, tuple(shape), generator=generator).to(dtype)
        return drawn, dict(types)
    return numbers(shape, generator) / 4 + 0.1, dict(types)
