"""The arguments of `check_adjoint`, checked: one ValueError says what was expected."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from placements.types.axis import AxisType, Varying
from placements.types.meaning import split
from placements.types.mesh import Mesh
from placements.types.text import as_axis_type

Types: TypeAlias = dict[str, AxisType]
ByRank: TypeAlias = list[Tensor]


def mesh_of_sizes(mesh: object) -> Mesh:
    if not isinstance(mesh, Mapping) or not mesh:
        raise ValueError(
            "check_adjoint: mesh must be the size of each axis, such as {'tp': 2}; "
            f"got {mesh!r}"
        )
    return Mesh(cast(Mapping[str, int], mesh))


def checked_inputs(inputs: object, mesh: Mesh) -> dict[str, tuple[Tensor, Types]]:
    if not isinstance(inputs, Mapping) or not inputs:
        raise ValueError(
            "check_adjoint: inputs must be at least one input by name, such as "
            f"{{'x': (x, {{'tp': R}})}}; got {inputs!r}"
        )
    found: dict[str, tuple[Tensor, Types]] = {}
    for name, pair in cast(Mapping[str, Any], inputs).items():
        match pair:
            case (Tensor() as value, types):
                pass
            case _:
                raise ValueError(
                    f"check_adjoint: input {name} must be a pair of a tensor and its "
                    f"types, such as (x, {{'tp': R}}); got {class_of(pair)}"
                )
        if value.dtype != torch.float64:
            raise ValueError(
                f"check_adjoint: input {name} is {value.dtype}, must be float64: "
                f"give {name}.double()"
            )
        found[name] = value.detach(), _types(f"input {name}", types, mesh)
    return found


def checked_outs(outs: object, mesh: Mesh) -> list[Types]:
    listed = [cast(object, outs)] if isinstance(outs, Mapping) else outs
    if not isinstance(listed, list | tuple) or not listed:
        raise ValueError(
            "check_adjoint: outs must be the types of the result, such as {'tp': R}, or a "
            f"list with the types of each result; got {outs!r}"
        )
    each = cast(Sequence[object], listed)
    return [_types(f"result {k}", types, mesh) for k, types in enumerate(each)]


def _types(what: str, types: object, mesh: Mesh) -> Types:
    """Return the types on axes of more than one rank; each such axis must be named."""
    if not isinstance(types, Mapping):
        raise ValueError(
            f"check_adjoint: the types of {what} must be a mapping such as {{'tp': R}}; "
            f"got {types!r}"
        )
    named = cast(Mapping[str, object], types)
    unknown = [axis for axis in named if axis not in mesh.sizes]
    missing = [axis for axis in mesh.axes if axis not in named]
    if unknown or missing:
        raise ValueError(
            f"check_adjoint: the types of {what} must name the axes {list(mesh.axes)} of "
            f"{mesh!r}; they name {list(named)}"
        )
    try:
        placed = {axis: as_axis_type(t) for axis, t in named.items()}
    except (TypeError, ValueError) as error:
        raise ValueError(f"check_adjoint: the types of {what}: {error}") from None
    return {axis: t for axis, t in placed.items() if mesh.sizes[axis] > 1}


def taken_by_name(fn: Callable[..., Any], names: list[str]) -> bool:
    """Return whether `fn` takes the inputs by name; if not, then in this order."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        raise ValueError(
            f"check_adjoint: the parameters of {fn!r} cannot be read; "
            "give a function that names them, such as lambda x: fn(x)"
        ) from None
    try:
        signature.bind(**dict.fromkeys(names))
        return True
    except TypeError:
        pass
    in_order = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [p.name for p in signature.parameters.values() if p.kind in in_order]
    try:
        if taken == names[: len(taken)]:  # else a name would stand for another parameter
            signature.bind(*names)
            return False
    except TypeError:
        pass
    raise ValueError(
        f"check_adjoint: fn takes {signature}, but the inputs are {names}; "
        "name the inputs as the parameters are named"
    )


def parts_of(name: str, value: Tensor, types: Types, mesh: Mesh) -> ByRank:
    ranks = [mesh.sizes[a] for a in mesh.axes if isinstance(types[a], Varying)]
    if list(value.shape[: len(ranks)]) != ranks:
        raise ValueError(
            f"check_adjoint: input {name} is {types}, so its first dims must be {ranks}, "
            f"one value for each rank; its shape is {tuple(value.shape)}"
        )
    try:
        return split(value, types, mesh)
    except ValueError as error:
        raise ValueError(f"check_adjoint: input {name}: {error}") from None


def class_of(value: object) -> str:
    kind = type(value).__name__
    if not isinstance(value, list | tuple):
        return kind
    within = cast(Sequence[object], value)
    return f"{kind} of ({', '.join(type(one).__name__ for one in within)})"
