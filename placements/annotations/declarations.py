"""Declare the types of tensors and of a module's parameters, and ask for a type."""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from placements._torch import unseen
from placements.checker.padding import declare_padding
from placements.inference.rules import DIM_REASONS
from placements.runtime import tags
from placements.runtime.callsite import located
from placements.runtime.declared import declared
from placements.runtime.describe import described
from placements.runtime.errors import mismatch, type_or_error, wrong_type
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
        return x
    with unseen():
        known = tags.get(x)
        if known is None or known.fresh is not None:
            tags.put(x, declared(checked_mesh(), types, tuple(x.shape), index))
        else:
            check_said(x, known, types)
            if index is not None:
                tags.put(x, known.with_index(index))
        if valid is not None:
            tags.put(x, declare_padding(x, type_or_error(x, "assert_type"), valid))
        observe("assert_type", None, x)
    return x


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
    """The tensor's type, a mapping axis -> type; None if it has none."""
    with unseen():
        return tags.get(x)


def declare(module: nn.Module, types: Mapping[str, TypesLike]) -> None:
    """Declare the types of a module's parameters and buffers, by name.

    The declaration belongs to the module, so it survives what makes new parameters:
    deepcopy, `to_empty`, `load_state_dict(assign=True)`, FSDP2. The tensors are stamped
    each time the module is called under `typecheck()`.
    """
    for name, given in types.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        if getattr(owner, leaf, None) is None:
            known = [n for n, _ in [*module.named_parameters(), *module.named_buffers()]]
            raise ValueError(f"no parameter or buffer {name!r}; there are {known}")
        _check_same(name, getattr(owner, leaf), given)
        if not declarations(owner):
            _called(module, owner_name).register_forward_pre_hook(_stamp_before)
        remember(owner, leaf, given)


def _check_same(name: str, tensor: Tensor, given: TypesLike) -> None:
    """Raise PlacementError if the tensor already has another type."""
    known = tags.get(tensor)
    if current.mode is None or known is None or known.fresh is not None:
        return
    with unseen():
        wanted = declared(checked_mesh(), given, tuple(tensor.shape))
    if known.mesh == wanted.mesh and known.types != wanted.types:
        axis = next(a for a in wanted if wanted[a] != known[a])
        raise mismatch(
            located("declare"), name, axis, repr(wanted[axis]), repr(known[axis]),
            rule="it was said to be another type before",
            operands=[described(tensor, known)],
        )  # fmt: skip


# Modules that are never called: the module that holds them uses their parameters.
_LISTS = (nn.ParameterList, nn.ParameterDict)


def _called(module: nn.Module, path: str) -> nn.Module:
    """The module of this name; of a list of parameters, the module that holds it."""
    owner = module.get_submodule(path)
    while path and isinstance(owner, _LISTS):
        path = path.rpartition(".")[0]
        owner = module.get_submodule(path)
    return owner


def stamp(module: nn.Module) -> None:
    """Give the module's own parameters and buffers the types declared for them."""
    with unseen():
        _stamp_own(module)
        for child in module.children():
            if isinstance(child, _LISTS):
                _stamp_own(child)


def _stamp_own(module: nn.Module) -> None:
    for name, types in declarations(module).items():
        tensor = getattr(module, name)
        tags.put(tensor, declared(checked_mesh(), types, tuple(tensor.shape)))
        watcher = observer()
        if watcher is not None:
            watcher.stamped(module, name, tensor)


def _stamp_before(module: nn.Module, args: Any) -> None:
    if current.mode is not None:
        stamp(module)
