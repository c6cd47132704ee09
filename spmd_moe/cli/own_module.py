"""A typed module of one's own: built without arguments, fed as its annotations say.

    forward    tensor arguments annotated with dims and `On(...)`, the others with defaults
    weights    annotated attributes of a `@typed` class, or `declare`
    reference  optional, a staticmethod: the same on one device, called with the global
               arguments by name and `weights`, the global parameters by name

Dims that a parameter's annotation names have its size; the others have `OTHER_DIMS` rows
on every rank. An axis that an annotation leaves open is Replicate.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn

from placements.annotations import Variable
from placements.declarations import declarations
from placements.mesh import set_current_mesh
from placements.state import suspended
from placements.testing.arguments import Argument, arguments_of
from placements.testing.draws import numbers, seeded
from placements.torch_private import unseen
from placements.types import AxisType, R, Shard, as_axis_type
from spmd_moe.cli.terminal import BadInput

OTHER_DIMS = 3

Types = dict[str, AxisType]
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
        """Arguments and parameters, under names that a call can use."""
        own = {_alias(name): placed for name, placed in self.parameters.items()}
        return {**self.inputs, **own}

    def call(self, **values: Tensor) -> Any:
        """The module on this rank's parts of `placed`."""
        weights = {name: values.pop(_alias(name)) for name in self.parameters}
        return torch.func.functional_call(_build(self.name, self.cls), weights, (), values)

    @property
    def reference(self) -> Callable[..., Any] | None:
        """The same on one device, from the global values of `placed`; None if not given."""
        target = getattr(self.cls, "reference", None)
        if target is None:
            return None

        def call(**values: Tensor) -> Any:
            weights = {name: values.pop(_alias(name)) for name in self.parameters}
            return target(**values, weights=weights)

        return call


def own_module(name: str, mesh: Mapping[str, int] | None) -> OwnModule:
    """The class of that name, with values to feed it; BadInput says what is missing."""
    cls = _find(name)
    # Annotations may read attributes, so there is a module before there are axes.
    with set_current_mesh(dict(mesh) if mesh else None):
        module = _build(name, cls)
        try:
            arguments = arguments_of(module)
        except ValueError as error:
            text = str(error).replace(repr(module), "forward")
            raise BadInput(f"--module {name}: {text}") from None
        _check_others(name, cls, arguments)
        axes = dict(mesh) if mesh else dict.fromkeys(_axes_of(arguments, module), 2)
    with set_current_mesh(axes):
        module = _build(name, cls)
        dims = _dims_of_parameters(module)
        inputs = {
            one.name: _placed(name, one.name, _shape(one, dims), _types(one, axes), axes)
            for one in arguments
        }
        parameters = {
            path: _placed(name, path, tuple(value.shape), types, axes)
            for path, value, types in _declared_parameters(name, module, axes)
        }
    return OwnModule(name, cls, axes, inputs, parameters)


def _alias(name: str) -> str:
    return "weight__" + name.replace(".", "__")


def _find(name: str) -> type[nn.Module]:
    path, _, leaf = name.replace(":", ".").rpartition(".")
    if not path:
        raise BadInput(f"--module {name}: write it as package.Class")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(path), leaf, None)
    except ImportError as error:
        raise BadInput(
            f"--module {name}: {error}; run it where {path} can be imported"
        ) from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise BadInput(f"--module {name}: {path} has no nn.Module of the name {leaf!r}")
    return found


def _build(name: str, cls: type[nn.Module]) -> nn.Module:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise BadInput(
            f"--module {name}: {leaf_of(name)}() must need no arguments ({error}); give it "
            "defaults, or name a subclass that fills them in"
        ) from None
    with unseen(), suspended():  # what is being made is not declared yet
        torch.default_generator.manual_seed(0)
        return cls().double()


def leaf_of(name: str) -> str:
    return name.replace(":", ".").rpartition(".")[2]


def _check_others(name: str, cls: type[nn.Module], arguments: list[Argument]) -> None:
    known = {"self", *(argument.name for argument in arguments)}
    for parameter in inspect.signature(inspect.unwrap(cls.forward)).parameters.values():
        needed = parameter.default is inspect.Parameter.empty
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if needed and not variadic and parameter.name not in known:
            raise BadInput(
                f"--module {name}: forward needs {parameter.name!r}, which is not "
                "annotated as a tensor with On(...); annotate it, or give it a default"
            )


def _axes_of(arguments: list[Argument], module: nn.Module) -> list[str]:
    said = [axis for argument in arguments for axis in argument.on]
    for owner in module.modules():
        said += [axis for types in declarations(owner).values() for axis in types]
    return list(dict.fromkeys(said)) or ["tp"]


def _dims_of_parameters(module: nn.Module) -> dict[str, int]:
    """The sizes here of the dims that annotated attributes name."""
    dims: dict[str, int] = {}
    for owner in module.modules():
        for name, hint in get_type_hints(type(owner), include_extras=True).items():
            text = str(getattr((get_args(hint) or (None,))[0], "dim_str", ""))
            value = getattr(owner, name, None)
            if text and isinstance(value, Tensor):
                for dim, rows in zip(text.split(), value.shape, strict=False):
                    dims.setdefault(dim, rows)
    return dims


def _shape(argument: Argument, dims: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(
        int(dim) if dim.isdigit() else dims.get(dim, OTHER_DIMS) for dim in argument.dims
    )


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
    module: str, name: str, local: tuple[int, ...], types: Types, axes: Mapping[str, int]
) -> Placed:
    """A global value whose parts have the shape `local`."""
    shape = list(local)
    for axis, t in types.items():
        if t.letter == "V":
            raise BadInput(
                f"--module {module}: {name} is Varying on {axis!r}, so no global value "
                "says what ranks hold; name a module that makes it from other types"
            )
        if isinstance(t, Shard):
            shape[t.dim] *= axes[axis]
    drawn = numbers(shape, seeded("own module", name))
    return drawn / 4 + 0.1, dict(types)
