"""Give parameters and buffers their declared types, each time their module is called.

This runs at every call of every module, and most tensors have their types from the last
call. So what is frequent is asked first, and of a whole tree by code of C.
"""

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from placements._torch import (
    held_by,
    modules_below,
    registered_below,
    tensor_in,
    unseen,
)
from placements.runtime import tags
from placements.runtime.callsite import located
from placements.runtime.declared import declared_of
from placements.runtime.describe import described
from placements.runtime.errors import mismatch
from placements.runtime.mesh import checked_mesh
from placements.runtime.state import checkers, current
from placements.types.axis import Shard
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

_type_in = tags.get
_NOTHING: Mapping[str, Any] = {}
_MOST_MODULES = 100_000

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
    if tags.mark_as_root(module, _Settled()):
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


def _stamp(owners: Sequence[nn.Module]) -> None:
    """Give the own tensors of modules their declared types, while checking is on."""
    mode = current.mode
    if mode is None:
        return
    mesh, watcher = checked_mesh(), mode.observer
    for owner in owners:
        for name, types in owner.__dict__.get(tags.DECLARED, _NOTHING).items():
            tensor = tensor_in(owner, name)
            if tensor is None:  # a buffer that the module has taken away since
                continue
            known = _type_in(tensor)
            if known is not None and known is types.settled and known.mesh is mesh:
                if watcher is None:  # as after the last call
                    continue
            with unseen():
                wanted = declared_of(mesh, types, tensor.shape)
                if tags.get(tensor) is not wanted:
                    check_same(f"{type(owner).__name__}()", name, tensor, wanted)
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
    if not checkers.count:
        return
    mode = current.mode
    if mode is None:
        return
    settled: _Settled = tags.root_of(module)
    if mode.observer is None and settled.holds(module, checked_mesh()):
        return
    modules = modules_below(module)
    _stamp(modules)
    settled.note(module, modules)


class _Settled:
    """What was registered below a module when all of it had its declared types.

    It holds no tensor and no module: what a program replaces must be freed.
    """

    names: Sequence[str] | None = None
    places: Sequence[int] = ()  # of the tensors with declared types, among the values
    types: Sequence[TensorType] = ()
    declared = 0

    def __reduce__(self) -> Any:
        return _Settled, ()  # a copy of a module looks itself

    def holds(self, module: nn.Module, mesh: Mesh) -> bool:
        """Return whether all tensors below the module have their declared types still."""
        names, types = self.names, self.types
        if names is None or self.declared != tags.declared.count:
            return False
        if types and types[0].mesh is not mesh:
            return False
        found = registered_below(module, len(names) + 1)
        if found is None or found[0] != names:
            return False
        tensors = map(found[1].__getitem__, self.places)
        return all(map(is_, map(_type_in, tensors), types))

    def note(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Remember what is below, unless a type may change while its tensor stays.

        A type with a cut depends on the shape, and what is not registered is not seen.
        """
        self.names = None
        known: dict[int, TensorType] = {}
        for owner in modules:
            for name, said in tags.declarations(owner).items():
                tensor = next((x for x in held_by(owner, name) if x is not None), None)
                if tensor is None or said.settled is None:
                    return
                known[id(tensor)] = said.settled
        found = registered_below(module, _MOST_MODULES)
        if found is None:
            return
        places = [k for k, value in enumerate(found[1]) if id(value) in known]
        self.places, self.types = places, [known[id(found[1][k])] for k in places]
        self.declared, self.names = tags.declared.count, found[0]
