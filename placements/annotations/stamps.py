"""Give parameters and buffers their declared types, each time their module is called.

This runs at every call of every module, and most tensors have their types from the last
call. So what is frequent is asked first, without a call of Python.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from placements._torch import PARAMETERS, modules_below, tensor_in, unseen
from placements.runtime import tags
from placements.runtime.callsite import located
from placements.runtime.declared import declared_of
from placements.runtime.describe import described
from placements.runtime.errors import mismatch
from placements.runtime.mesh import checked_mesh, said_meshes
from placements.runtime.state import block_here, checkers, current, others
from placements.types.axis import Shard
from placements.types.tensor import TensorType

_type_in = tags.get
_block_here = block_here.get
_said_mesh = said_meshes.innermost.get
_DECLARED = tags.DECLARED

# Modules that are never called: the module that holds them uses their parameters.
_LISTS = (nn.ParameterList, nn.ParameterDict)


def stamp_when_called(module: nn.Module, path: str) -> None:
    """Stamp the module of this name below `module` when it is called.

    A list of parameters is stamped when the module is called that holds it.
    """
    owner = called = module.get_submodule(path)
    while path and isinstance(called, _LISTS):
        path = path.rpartition(".")[0]
        called = module.get_submodule(path)
    called.register_forward_pre_hook(
        _stamp_before if called is owner else _stamp_lists_before
    )


def stamp_all_when_called(module: nn.Module) -> None:
    """Stamp all that is below, because a parameter may be used by any module above it."""
    if tags.mark_as_root(module):
        module.register_forward_pre_hook(_stamp_tree_before)


def check_same(where: str, name: str, tensor: Tensor, wanted: TensorType) -> None:
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


def stamp(module: nn.Module) -> None:
    """Give the module's own parameters and buffers the types declared for them."""
    lists = [child for child in module.children() if isinstance(child, _LISTS)]
    _stamp([module, *lists])


def _stamp(owners: Sequence[nn.Module], *, below: bool = False) -> None:
    """Give the own tensors of modules their declared types, while checking is on.

    `below` a module there may be some that live on another mesh, as experts do: those get
    their types when they are called, where that mesh is current.
    """
    mode = current.mode
    if mode is None:
        if (other := current.other) is not None:
            for owner in owners:
                other.stamped(owner)
        return
    mesh, watcher = checked_mesh(), mode.observer
    for owner in owners:
        held = owner.__dict__
        if _DECLARED not in held:
            continue
        parameters = held[PARAMETERS]
        for name, types in held[_DECLARED].items():
            tensor = parameters.get(name)
            if tensor is None:
                tensor = tensor_in(owner, name)
                if tensor is None:  # a buffer that the module has taken away since
                    continue
            known = _type_in(tensor)
            if known is not None and known is types.settled and known.mesh is mesh:
                if watcher is None:  # as after the last call
                    continue
            if below and mesh.axes and types.keys().isdisjoint(mesh.axes):
                continue
            with unseen():
                wanted = declared_of(mesh, types, tensor.shape)
                if tags.get(tensor) is not wanted:
                    check_same(f"{type(owner).__name__}()", name, tensor, wanted)
                    tags.put(tensor, wanted)
                if watcher is not None:
                    watcher.stamped(owner, name, tensor)


def _stamp_before(module: nn.Module, args: Any) -> None:
    """Stamp a module, unless all its tensors have their types and nobody is to be told."""
    if others.count:
        return _stamp((module,))
    if not checkers.count:
        return
    here, said = _block_here(), _said_mesh()
    if here is None or said is None or not (here.is_open and said.is_open):
        return _stamp((module,))
    if here.mode.observer is not None:
        return _stamp((module,))
    mesh, held = said.value, module.__dict__
    parameters = held[PARAMETERS]
    for name, types in held[_DECLARED].items():
        tensor, wanted = parameters.get(name), types.settled
        if tensor is None or wanted is None or wanted.mesh is not mesh:
            return _stamp((module,))
        if _type_in(tensor) is not wanted:
            return _stamp((module,))


def _stamp_lists_before(module: nn.Module, args: Any) -> None:
    if checkers.count or others.count:
        stamp(module)


def _stamp_tree_before(module: nn.Module, args: Any) -> None:
    if checkers.count or others.count:
        _stamp(modules_below(module), below=True)
