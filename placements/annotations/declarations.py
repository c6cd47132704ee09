"""Declare the types of tensors and of a module's parameters, and ask for a type."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from placements._torch import unseen
from placements.annotations.saving import tell_checkpoints
from placements.annotations.stamps import (
    check_same,
    stamp_all_when_called,
    stamp_when_called,
)
from placements.checker.padding import declare_padding
from placements.inference.rules import DIM_REASONS
from placements.runtime import tags
from placements.runtime.declared import declared
from placements.runtime.errors import type_or_error, wrong_type
from placements.runtime.filled import up_to_date
from placements.runtime.mesh import checked_mesh
from placements.runtime.state import current, observer
from placements.runtime.tags import declarations, remember
from placements.types.axis import Shard, TypesLike
from placements.types.index import Index
from placements.types.tensor import TensorType
from placements.types.text import as_axis_type

T = TypeVar("T")


def assert_type(
    x: Tensor,
    types: TypesLike,
    *,
    index: Index | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Declare an untyped tensor, check a typed one; returns `x`.

    With checking off it does nothing. `index` says what an integer tensor indexes.
    `valid` is a mask over the first dims of `x`: where it is False are rows of padding.
    Raises PlacementError if the tensor has another type, ValueError if the declaration
    does not fit the mesh or the tensor.
    """
    if current.mode is None:
        other = current.other
        return x if other is None else other.declared(x, types)
    with unseen():
        known = tags.get(x)
        if known is None or known.fresh is not None:
            wanted = declared(checked_mesh(), types, tuple(x.shape), index)
            if known is not None and known.mesh == wanted.mesh:
                _check_known_sizes(x, known, wanted)
            tags.put(x, wanted)
        else:
            check_said(x, known, types)
            if index is not None:
                tags.put(x, known.with_index(index))
        if valid is not None:
            tags.put(x, declare_padding(x, type_or_error(x, "assert_type"), valid))
        observe("assert_type", None, x)
    return x


def _check_known_sizes(x: Tensor, known: TensorType, wanted: TensorType) -> None:
    """Raise PlacementError if a factory's tensor was sized or filled as another type.

    A constant of plain sizes may be declared to be anything. One that has the sizes of a
    piece, or is filled with such a size, is a piece or a summand whatever anybody says.
    """
    for axis, t in known.items():
        if t.letter in "SP" and t != wanted[axis]:
            raise wrong_type("assert_type", x, known, axis, repr(wanted[axis]), repr(t))


def observe(where: str, name: str | None, x: Tensor) -> None:
    watcher = observer()
    if watcher is not None:
        watcher.crossing(where, name, x, tags.get(x))


def check_said(x: Tensor, known: TensorType, types: TypesLike) -> None:
    wanted = declared(known.mesh, types, tuple(x.shape))
    for axis, expected in wanted.items():
        given = as_axis_type(types[axis])
        if isinstance(given, Shard) and isinstance(expected, Shard):
            # A declaration without an extent leaves it open.
            expected = Shard(expected.dim, given.extent and expected.extent)
        if known[axis] != expected:
            raise wrong_type(
                "assert_type", x, known, axis, repr(expected), repr(known[axis])
            )
    for axes in known.cut_dims.values():
        given = [axis for axis in types if axis in axes]
        if given != list(axes):
            raise wrong_type(
                "assert_type", x, known, axes[0], f"cut over {given}, outermost first",
                f"cut over {list(axes)}", rule=DIM_REASONS["other order"],
            )  # fmt: skip


def type_of(x: Tensor) -> TensorType | None:
    """The tensor's type, a mapping axis -> type; None if it has none.

    In compiled code no tensor has one: what is compiled is not checked.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    if current.other is not None:
        return current.other.type_of(x)
    with unseen():
        return up_to_date(x)


def declare(module: nn.Module, types: Mapping[str, TypesLike]) -> None:
    """Declare the types of a module's parameters and buffers, by name.

    A `*` in a name stands for any text, dots included, so that one line declares somebody
    else's model: `declare(model, {"*": {"dp": R}})`. `?` and `[...]` stand for one letter,
    as in names of files. The first name that fits holds.

    The declaration belongs to the module, so it survives what makes new parameters:
    deepcopy, `to_empty`, `load_state_dict(assign=True)`, FSDP2. The tensors are stamped
    each time `module`, or the module that holds them, is called under `typecheck()`.
    """
    for name, given in by_whole_name(module, types).items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        tensor = getattr(owner, leaf)
        if current.mode is not None:
            with unseen():
                wanted = declared(checked_mesh(), given, tuple(tensor.shape))
                check_same("declare", name, tensor, wanted)
        if not declarations(owner):
            stamp_when_called(module, owner_name)
            tell_checkpoints(owner)
        remember(owner, leaf, given)
    stamp_all_when_called(module)


def by_whole_name(
    module: nn.Module, types: Mapping[str, TypesLike]
) -> dict[str, TypesLike]:
    """Return the declarations with each `*` replaced by the names that it stands for."""
    every = [
        *(name for name, _ in module.named_parameters(remove_duplicate=False)),
        *(name for name, _ in module.named_buffers(remove_duplicate=False)),
    ]
    found: dict[str, TypesLike] = {}
    for name, given in types.items():
        if any(character in name for character in "*?["):
            meant = [one for one in every if fnmatchcase(one, name)]
        else:
            meant = [name] if _attribute(module, name) is not None else []
        if not meant:
            raise ValueError(f"no parameter or buffer {name!r}; there are {every}")
        found = dict.fromkeys(meant, given) | found
    return found


def _attribute(module: nn.Module, name: str) -> Any:
    """Return what the module, or one below it, has under the name, or None."""
    for part in name.split("."):
        module = getattr(module, part, None)  # pyright: ignore[reportAssignmentType]
    return module
