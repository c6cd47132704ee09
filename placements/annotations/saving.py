"""What `torch.distributed.checkpoint` is told of a tensor in a plain `state_dict()`.

A checkpoint takes a plain tensor for one value that all ranks hold, and writes that of one
rank. Of a parameter that is cut over ranks it would lose the other pieces, and say nothing.
So the tensors of a module's state dict whose declared type cuts them say which pieces they
are. Tensors of an optimizer's state refuse to be saved in this way: that state goes by the
numbers of parameters, by which no other mesh could read it. All of them stay plain tensors:
`torch.save`, `load_state_dict` and copies work as in plain torch.
"""

import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from placements._torch import (
    CHUNK_LIST,
    SHARD,
    WRITE_ITEMS,
    chunk_list,
    groups,
    held_by,
    on_many_ranks,
    part_of_dtensor,
    pytree,
    shard_at,
    unseen,
    when_optimizers_show_state,
    write_items,
)
from placements.runtime.declared import declared
from placements.runtime.dtensors import local_part
from placements.runtime.mesh import current_mesh
from placements.runtime.tags import declarations
from placements.types.axis import TypesLike
from placements.types.boxes import Box, boxes_of, global_shape
from placements.types.mesh import Mesh, live_meshes
from placements.types.tensor import TensorType
from placements.types.text import as_axis_type

_INSTEAD = "save sharded_state_dict(module, meshes=...) instead"


def tell_checkpoints(module: nn.Module) -> None:
    """Have the state dict of a module say which pieces its tensors are; called once."""
    cast(Any, module).register_state_dict_post_hook(_Teller(module))
    when_optimizers_show_state(_tell_of_optimizer)


class _Teller:
    """The hook of a module's state dict.

    A copy of the module, or one that is unpickled, gets a hook that knows the copy.
    """

    def __init__(self, module: nn.Module) -> None:
        key = id(module)
        self.module = weakref.ref(module, lambda _: _told.pop(key, None))
        _told[key] = self.module

    def __reduce__(self) -> Any:
        return _Teller, (self.module(),)

    def __call__(self, module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        if not _is_spread():
            return
        for name, told in _cut_by(module):
            tensor = state.get(prefix + name)
            if isinstance(tensor, Tensor):
                told.written = weakref.ref(tensor)
                setattr(tensor, WRITE_ITEMS, told.write_items)
                setattr(tensor, CHUNK_LIST, told.chunk_list)
                setattr(tensor, SHARD, told.shard)


# The modules that have one, by their ids: an optimizer knows parameters alone.
_told: dict[int, weakref.ref[nn.Module]] = {}


def _cut_by(module: nn.Module) -> Iterator[tuple[str, "_Told"]]:
    """Yield the names of a module's own tensors whose declared type cuts them."""
    said: Any = vars(module).get("meshes", ())
    stated = cast(tuple[Any, ...], said if isinstance(said, tuple) else ())
    sure = [one for one in (*stated, current_mesh()) if isinstance(one, Mesh)]
    for name, types in declarations(module).items():
        if any(as_axis_type(t).letter in "SVP" for t in types.values()):
            yield name, _Told(types, sure)


def _tell_of_optimizer(optimizer: Optimizer) -> None:
    """Have the state of parameters that are cut refuse to be saved as it is."""
    cut: dict[int, tuple[str, _Told]] = {}
    for reference in list(_told.values()) if _is_spread() else ():
        module = reference()
        for name, told in () if module is None else _cut_by(module):
            _, parameter = held_by(cast(nn.Module, module), name)
            cut[id(parameter)] = name, told
    for parameter, kept in optimizer.state.items():
        name, told = cut.get(id(parameter), ("", None))
        why = "" if told is None else told.why_cut(name, parameter)
        for tensor in pytree.tree_leaves(kept):
            if isinstance(tensor, Tensor) and (tensor.dim() or not parameter.dim()):
                _have_refused(tensor, why)


def _have_refused(tensor: Tensor, why: str) -> None:
    """Have a tensor refuse to be saved or loaded by a planner; not any more without why."""
    if why:
        refusing = _Refusing(why)
        setattr(tensor, WRITE_ITEMS, refusing.write_items)
        setattr(tensor, CHUNK_LIST, refusing.chunk_list)
    elif isinstance(getattr(vars(tensor).get(WRITE_ITEMS), "__self__", None), _Refusing):
        delattr(tensor, WRITE_ITEMS)
        delattr(tensor, CHUNK_LIST)


class _Refusing:
    """What the state of a parameter that is cut answers to the planner of a checkpoint."""

    def __init__(self, why: str) -> None:
        self.why = why

    def write_items(self, name: str, _: Tensor) -> list[Any]:
        raise ValueError(
            f"{name!r} is state of an optimizer, and {self.why}: "
            "save sharded_state_dict(module, optimizer, meshes=...) instead"
        )

    def chunk_list(self) -> list[Any]:
        raise TypeError(  # torch gives another meaning to a ValueError
            f"this tensor is state of an optimizer, and {self.why}: "
            "load_sharded_state_dict(module, path, optimizer) reads what each rank holds"
        )


class _Told:
    """What a tensor of a state dict answers to the planner of a checkpoint."""

    def __init__(self, types: TypesLike, sure: list[Mesh]) -> None:
        # The tensor lives on the first mesh in `sure` that fits; the module states these
        # meshes, or they were current.
        self.types, self.sure = types, sure
        self.written: weakref.ref[Tensor] | None = None

    def __deepcopy__(self, memo: object) -> "_Told":
        return _Told(self.types, self.sure)  # a copy of the tensor says so of itself

    def write_items(self, name: str, tensor: Tensor) -> list[Any]:
        self.written = weakref.ref(tensor)
        with unseen():
            size, boxes = self._pieces(name, tensor)
            return write_items(name, local_part(tensor)[0], size, boxes)

    def shard(self, index: Any) -> Tensor:
        tensor = None if self.written is None else self.written()
        assert tensor is not None, "a planner asks for the items first"
        with unseen():
            size, boxes = self._pieces(index.fqn, tensor)
            return shard_at(index, local_part(tensor)[0].detach(), size, boxes)

    def chunk_list(self) -> list[Any]:
        """Return where to read the tensor, if it is whole here after all.

        The tensor must be whole here: torch has compared only its size with that of the
        tensor in the checkpoint.
        """
        tensor = None if self.written is None else self.written()
        if tensor is not None:
            with unseen():
                size, boxes = self._pieces("this tensor", tensor)
            if tuple(tensor.shape) == size and [box.sizes for box in boxes] == [size]:
                return chunk_list(boxes)
        raise TypeError(  # torch gives another meaning to a ValueError
            "this tensor is the piece of one rank, and a checkpoint holds the whole; "
            "load_sharded_state_dict(module, path) reads what each rank holds"
        )

    def why_cut(self, name: str, tensor: Tensor) -> str:
        """Return why ranks hold different parts of a parameter; empty if they do not."""
        try:
            found = self._types(name, tuple(tensor.shape))
        except ValueError as error:
            return str(error).removesuffix(f": {_INSTEAD}")
        cut = [(a, t) for one in found for a, t in one.items() if t.letter in "SV"]
        over = [f"{t!r} on axis {a!r}" for a, t in cut if found[0].mesh.sizes.get(a) != 1]
        return f"its parameter {name!r} is {over[0]}" if over else ""

    def _pieces(self, name: str, tensor: Tensor) -> tuple[tuple[int, ...], list[Box]]:
        """Return the size of the global tensor, and what this rank holds of it."""
        shape = tuple(tensor.shape)
        part = part_of_dtensor(tensor) if local_part(tensor)[1] else None
        found = [
            (global_shape(one, shape), boxes_of(one, shape, part))
            for one in self._types(name, shape)
        ]
        if any(other != found[0] for other in found[1:]):
            raise ValueError(
                f"{name!r} is cut over ranks, and meshes in use differ in how: {_INSTEAD}"
            )
        return found[0]

    def _types(self, name: str, shape: tuple[int, ...]) -> list[TensorType]:
        """Return what the tensor may be: its type on each mesh that it may live on."""
        found: list[TensorType] = []
        for mesh in self._meshes():
            if all(axis in self.types for axis in mesh.axes):
                try:
                    found.append(declared(mesh, self.types, shape))
                except ValueError:  # it does not fit, so it lives on another one
                    continue
            if found and any(mesh is one for one in self.sure):
                break
        if not found:
            raise ValueError(
                f"{name!r} is declared {dict(self.types)}, and no mesh is known on which "
                f"it is cut so: {_INSTEAD}"
            )
        summed = [a for t in found for a, on_axis in t.items() if on_axis.letter == "P"]
        if summed:
            raise ValueError(
                f"{name!r} is Partial on axis {summed[0]!r}: ranks hold summands of it, "
                "and a checkpoint in pieces holds values; use global_state_dict"
            )
        return found

    def _meshes(self) -> list[Mesh]:
        """Return the meshes over all ranks, first those that are sure."""
        if not on_many_ranks():
            return []
        known = [*self.sure, *live_meshes()]
        return [mesh for mesh in known if _is_over_all_ranks(mesh)]


def _is_spread() -> bool:
    """Return whether a tensor here may be one of several pieces."""
    mesh = current_mesh()
    return bool(mesh and mesh.axes) or on_many_ranks()


def _is_over_all_ranks(mesh: Mesh) -> bool:
    """Return whether a mesh is over the ranks that this process is one of now."""
    if mesh.device_mesh is None or mesh.num_ranks != dist.get_world_size():
        return False
    alive = set(map(id, groups()))
    try:
        return all(id(mesh.group(axis)) in alive for axis in mesh.axes)
    except Exception:  # what torch raises for a group that was destroyed varies
        return False
