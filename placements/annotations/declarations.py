"""Declare the types of tensors and of a module's parameters, and ask for a type."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from placements._torch import modules_below, tensor_in, unseen
from placements.annotations.saving import tell_checkpoints
from placements.checker.padding import declare_padding
from placements.inference.rules import DIM_REASONS
from placements.runtime import tags
from placements.runtime.callsite import located
from placements.runtime.declared import declared, declared_of
from placements.runtime.describe import described
from placements.runtime.errors import mismatch, type_or_error, wrong_type
from placements.runtime.filled import up_to_date
from placements.runtime.mesh import checked_mesh
from placements.runtime.state import checkers, current, observer
from placements.runtime.tags import declarations, mark_as_root, remember
from placements.types.axis import Shard, TypesLike
from placements.types.index import Index
from placements.types.tensor import TensorType
from placements.types.text import as_axis_type

T = TypeVar("T")

_type_in = tags.get


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
        return x
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
                _check_same("declare", name, tensor, wanted)
        if not declarations(owner):
            called = _called(module, owner_name)
            hook = _stamp_before if called is owner else _stamp_lists_before
            called.register_forward_pre_hook(hook)
            tell_checkpoints(owner)
        remember(owner, leaf, given)
    if mark_as_root(module):
        module.register_forward_pre_hook(_stamp_tree_before)


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


def _check_same(where: str, name: str, tensor: Tensor, wanted: TensorType) -> None:
    """Raise PlacementError if the tensor is known to have another type.

    A tied parameter may have two declarations, and a tensor with a type of its own may
    have taken the place of a declared parameter. Extents are left alone: outside of a
    block a parameter may have been replaced by a piece of another length.
    """
    known = tags.get(tensor)
    if known is None or known.fresh is not None or known.mesh != wanted.mesh:
        return
    for axis, t in wanted.items():
        other = known[axis]
        cuts = [x.dim for x in (t, other) if isinstance(x, Shard)]
        if t.letter != other.letter or len(set(cuts)) > 1:
            raise mismatch(
                located(where), name, axis, repr(t), repr(other),
                rule="a parameter is what it was declared to be, and this tensor is known "
                "to be something else",
                operands=[described(tensor, known)],
            )  # fmt: skip


# Modules that are never called: the module that holds them uses their parameters.
_LISTS = (nn.ParameterList, nn.ParameterDict)


def _called(module: nn.Module, path: str) -> nn.Module:
    """Return the module of this name; of a list of parameters, the module that holds it."""
    owner = module.get_submodule(path)
    while path and isinstance(owner, _LISTS):
        path = path.rpartition(".")[0]
        owner = module.get_submodule(path)
    return owner


def stamp(module: nn.Module) -> None:
    """Give the module's own parameters and buffers the types declared for them."""
    lists = [child for child in module.children() if isinstance(child, _LISTS)]
    _stamp([module, *lists])


def _stamp(owners: Sequence[nn.Module], *, below: bool = False) -> None:
    """Give the own tensors of modules their declared types, while checking is on.

    It runs at each call of a module, and most tensors have their types from the last one.
    `below` a module there may be some that live on another mesh, as experts do: those get
    their types when they are called, where that mesh is current.
    """
    mode = current.mode
    if mode is None:
        return
    mesh, watcher = checked_mesh(), mode.observer
    for owner in owners:
        if tags.DECLARED not in owner.__dict__:
            continue
        for name, types in owner.__dict__[tags.DECLARED].items():
            tensor = tensor_in(owner, name)
            if tensor is None:  # a buffer that the module has taken away since
                continue
            settled = types.settled
            if settled is not None and watcher is None and settled.mesh is mesh:
                if _type_in(tensor) is settled:  # as after the last call
                    continue
            if below and mesh.axes and types.keys().isdisjoint(mesh.axes):
                continue
            with unseen():
                wanted = declared_of(mesh, types, tensor.shape)
                if tags.get(tensor) is not wanted:
                    _check_same(f"{type(owner).__name__}()", name, tensor, wanted)
                    tags.put(tensor, wanted)
                if watcher is not None:
                    watcher.stamped(owner, name, tensor)


def _stamp_before(module: nn.Module, args: Any) -> None:
    if checkers.count:
        _stamp((module,))


def _stamp_lists_before(module: nn.Module, args: Any) -> None:
    if checkers.count:
        stamp(module)


def _stamp_tree_before(module: nn.Module, args: Any) -> None:
    """Stamp all that is below, because a parameter may be used by any module above it."""
    if checkers.count:
        _stamp(modules_below(module), below=True)
