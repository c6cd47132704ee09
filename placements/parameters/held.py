"""The declared types of a module's parameters and buffers, on the mesh each lives on.

Gradient reduction, clipping and checkpoints read types here and nowhere else. Types come
from declarations, which belong to modules, so all of it works with checking off.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch.distributed as dist
from torch import Tensor, nn

from placements._torch import on_many_ranks
from placements.collectives.transport import AxisRanks
from placements.runtime.declared import declared
from placements.runtime.errors import refused
from placements.runtime.mesh import NO_MESH, current_mesh, unknown_axis_here
from placements.runtime.tags import declarations
from placements.types.axis import TypesLike
from placements.types.mesh import Mesh, MeshLike, as_mesh
from placements.types.tensor import TensorType

Meshes: TypeAlias = "MeshLike | Sequence[MeshLike] | None"

# What wrappers put into the names of the modules that they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of a module, by its full name, with its declared type."""

    name: str
    tensor: Tensor
    type: TensorType


def meshes_or_current(call: str, meshes: Meshes) -> tuple[Mesh, ...]:
    """Return the meshes that parameters may live on; without any, the current one.

    Raises ValueError if there are several ranks but no mesh: nothing would be done.
    """
    if meshes is not None:
        return _each(call, meshes)
    mesh = current_mesh()
    if mesh is not None:
        return (mesh,)
    if on_many_ranks():
        raise ValueError(
            f"{call}: there are {dist.get_world_size()} ranks, but no mesh is current; "
            "with set_current_mesh(mesh): ..., or pass meshes=(mesh,)"
        )
    return (NO_MESH,)


def _each(call: str, meshes: "MeshLike | Sequence[MeshLike]") -> tuple[Mesh, ...]:
    """Return the meshes given: several, or one."""
    one = isinstance(meshes, Mesh | Mapping) or hasattr(meshes, "mesh_dim_names")
    every = (meshes,) if one else meshes
    if not isinstance(every, Iterable) or isinstance(every, str | Tensor):
        raise TypeError(
            f"{call}: meshes= takes a mesh or several over the same ranks, "
            f"meshes=(dense, sparse); got {meshes!r}"
        )
    return tuple(as_mesh(cast(MeshLike, mesh)) for mesh in every)


def ranks_of(mesh: Mesh, axis: str) -> AxisRanks:
    """Return the ranks of one axis of `mesh`, seen from this rank."""
    return AxisRanks(axis, mesh.sizes[axis], mesh.place[axis], mesh.group(axis))


def all_parameters(call: str, module: nn.Module, meshes: Sequence[Mesh]) -> list[Held]:
    """Return every parameter, trained or not, once, with its type."""
    return _parameters(call, module, meshes, lambda p: True)


def trained_parameters(call: str, module: nn.Module, meshes: Sequence[Mesh]) -> list[Held]:
    """Return every parameter that requires a gradient, once, with its type.

    Which ones does not depend on where a gradient is None: ranks may differ in that.
    """
    return _parameters(call, module, meshes, lambda p: p.requires_grad)


def frozen_parameters(call: str, module: nn.Module, meshes: Sequence[Mesh]) -> list[Held]:
    """Return every parameter that requires no gradient but has one, with its type."""
    return _parameters(
        call, module, meshes, lambda p: not p.requires_grad and p.grad is not None
    )


def _parameters(
    call: str, module: nn.Module, meshes: Sequence[Mesh], which: Callable[[Tensor], bool]
) -> list[Held]:
    found: dict[int, Held] = {}
    for name, tensor, said in _named(module):
        if isinstance(tensor, nn.Parameter) and which(tensor):
            _add(found, call, name, tensor, said, meshes)
    return _typed(found, call, meshes)


def saved_tensors(call: str, module: nn.Module, meshes: Sequence[Mesh]) -> list[Held]:
    """Return every parameter and persistent buffer, under each name, with its type."""
    state = module.state_dict(keep_vars=True)
    extra = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if extra:
        raise ValueError(
            f"{call}: {extra[0]!r} is extra state, which has no type to save by"
        )
    persistent = {id(tensor) for tensor in state.values()}
    found: dict[int, Held] = {}
    names: list[tuple[str, Tensor]] = []
    for name, tensor, said in _named(module):
        if id(tensor) in persistent:
            _add(found, call, name, tensor, said, meshes)
            names.append((name, tensor))
    _typed(found, call, meshes)
    return [Held(name, tensor, found[id(tensor)].type) for name, tensor in names]


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor, TypesLike | None]]:
    modules = cast(Any, module).named_modules(remove_duplicate=False)
    for prefix, owner in cast(Iterable[tuple[str, nn.Module]], modules):
        path = f"{prefix}." if prefix else ""
        for wrapper in _WRAPPERS:
            path = path.replace(wrapper, "")
        said = declarations(owner)
        own = (
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
        )
        for leaf, tensor in own:
            yield path + leaf, tensor, said.get(leaf)


def _add(
    found: dict[int, Held],
    call: str,
    name: str,
    tensor: Tensor,
    said: TypesLike | None,
    meshes: Sequence[Mesh],
) -> None:
    """Add a tensor; a tensor with several names may be declared under any of them."""
    mesh = meshes[0] if said is None else _mesh_of(call, name, said, meshes)
    known = found.get(id(tensor))
    if said is None:
        found.setdefault(id(tensor), Held(name, tensor, _UNDECLARED))
        return
    try:
        tensor_type = declared(mesh, said, tuple(tensor.shape))
    except ValueError as error:
        raise ValueError(f"{call}: parameter {name!r}: {error}") from None
    if known is None or known.type is _UNDECLARED:
        found[id(tensor)] = Held(name if known is None else known.name, tensor, tensor_type)
    elif known.type != tensor_type:
        raise ValueError(
            f"{call}: {known.name!r} and {name!r} are one tensor, declared as "
            f"{known.type!r} and as {tensor_type!r}"
        )


_UNDECLARED = TensorType(Mesh({}), ())


def _typed(found: dict[int, Held], call: str, meshes: Sequence[Mesh]) -> list[Held]:
    """Return the tensors that were found; PlacementError if one has no declared type.

    On one rank nothing needs to be declared.
    """
    mesh = next((mesh for mesh in meshes if mesh.axes), None)
    for held in found.values():
        if held.type is _UNDECLARED and mesh is not None:
            axes = ", ".join(f"{axis!r}: ..." for axis in mesh.axes)
            raise refused(
                call,
                f"parameter {held.name!r} has no declared type",
                name=held.name,
                rule="what to do with a parameter's values and gradient follows from its "
                "type on each mesh axis",
                advice=f"declare(module, {{{held.name!r}: {{{axes}}}}}), or annotate the "
                "attribute of a @typed module",
            )
    return list(found.values())


def _mesh_of(call: str, name: str, said: TypesLike, meshes: Sequence[Mesh]) -> Mesh:
    """Return the mesh, of several over the same ranks, whose axes a declaration names."""
    for mesh in meshes:
        if all(axis in said for axis in mesh.axes):
            return mesh
    unknown = [axis for axis in said if not any(axis in mesh.sizes for mesh in meshes)]
    wrong = unknown_axis_here(meshes[0], unknown)
    raise ValueError(
        f"{call}: parameter {name!r} is declared on {list(said)}, but each of the meshes "
        f"({', '.join(map(repr, meshes))}) has an axis that this leaves out; parameters "
        "that live on another mesh over the same ranks need it: meshes=(dense, sparse)"
        + (f". The declaration {wrong}" if wrong else "")
    )
