"""Our types in the words of `spmd_types`, and back; programs under its checker.

R, I, V and P are the same words. A Shard is a Varying there, with a PartitionSpec that
says which dim; it knows no extents, so only even pieces can be said.
"""

import importlib
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias, cast

import spmd_types
import spmd_types.checker
from torch import Tensor

from placements.interop.engines import Engine
from placements.interop.fake_world import device_mesh_of, quiet
from placements.interop.spmd import axes_of
from placements.testing.programs import Program
from placements.types.axis import BY_LETTER, AxisType, Shard, V
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make

_peer = cast(Any, spmd_types)
_checker = cast(Any, spmd_types.checker)

# axis -> R, I, V or P; and the PartitionSpec, if a dim is cut
PeerTypes: TypeAlias = tuple[dict[str, Any], Any]

_TO_PEER: Mapping[str, Any] = {letter: getattr(spmd_types, letter) for letter in BY_LETTER}
_FROM_PEER: Mapping[Any, AxisType] = {
    peer: BY_LETTER[letter] for letter, peer in _TO_PEER.items()
}


def axis_type_to_peer(t: AxisType) -> Any:
    """Return the word of `spmd_types`; ValueError for pieces of unequal length."""
    if not isinstance(t, Shard):
        return _TO_PEER[t.letter]
    if t.extent is not None and not t.extent.is_even:
        raise ValueError(
            f"{t!r} cannot be said in spmd_types, which does not know how a dim is cut; "
            "it can say equal pieces only"
        )
    return _peer.S(t.dim)


def axis_type_from_peer(t: Any) -> AxisType:
    """Return our word for R, I, V, P or S(dim) of `spmd_types`."""
    if isinstance(t, _peer.Shard):
        return Shard(t.dim)
    if t not in _FROM_PEER:
        raise ValueError(f"{t!r} is not a type of spmd_types: R, I, V, P or S(dim)")
    return _FROM_PEER[t]


def to_peer(t: TensorType, ndim: int) -> PeerTypes:
    """Return what `spmd_types.assert_type` takes for a tensor of `ndim` dims."""
    said: dict[str, Any] = {}
    for axis, one in t.items():
        axis_type_to_peer(one)  # for its error
        said[axis] = _TO_PEER["V" if isinstance(one, Shard) else one.letter]
    orders = [t.order(dim) for dim in range(ndim)]
    if not any(orders):
        return said, None
    entries = [None if not o else o[0] if len(o) == 1 else o for o in orders]
    return said, _peer.PartitionSpec(*entries)


def from_peer(said: Mapping[str, Any], spec: Any, mesh: Mesh) -> TensorType:
    """Return our type on `mesh` for what `spmd_types` says of a tensor.

    `said` maps axis names to R, I, V or P; `spec` is the PartitionSpec or None, with axis
    names. The order of axes that share a dim is kept.
    """
    types: dict[str, AxisType] = {}
    entries: Any = spec or ()
    for dim, entry in enumerate(entries):
        types |= {axis: Shard(dim) for axis in axes_of(entry)}
    for axis in mesh.axes:
        if axis not in said:
            raise ValueError(f"the tensor has no type on mesh axis {axis!r}")
        found = axis_type_from_peer(said[axis])
        if axis in types and found != V:
            raise ValueError(f"axis {axis!r} is {found!r}, yet the PartitionSpec cuts it")
        types.setdefault(axis, found)
    return make(mesh, types)


class SpmdTypes(Engine):
    """The checker of `spmd_types`: local mode, or global mode, which knows dims."""

    # Its own errors are RuntimeErrors, as those of torch are; by ValueErrors and by
    # assertions with a message it says what it demands of a call.
    refusals = (RuntimeError, ValueError, AssertionError)
    names: Mapping[str, Any] = {
        name: getattr(spmd_types, name)
        for name in "R I V P S all_reduce all_gather reduce_scatter all_to_all "
        "redistribute convert reinterpret".split()
    }

    def __init__(self, *, local: bool) -> None:
        self.local = local
        self.name = f"spmd_types {'local' if local else 'global'}"

    def checking(self, mesh: Mesh) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(self.running(mesh))
        stack.enter_context(_checker.typecheck(local=self.local))
        return stack

    def on_threads(self) -> AbstractContextManager[Any]:
        return _patched_once()

    def running(self, mesh: Mesh) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(quiet())
        stack.enter_context(_peer.set_current_mesh(device_mesh_of(mesh)))
        return stack

    def locally(self, body: Callable[[], Any], outs: Any) -> Any:
        return body() if self.local else _peer.local_map(out_types=outs)(body)()

    def declare(self, local: Tensor, t: TensorType) -> Tensor:
        said, spec = to_peer(t, local.dim())
        if spec is None or self.local:
            return _peer.assert_type(local, said)
        return _peer.assert_type(local, said, partition_spec=spec)

    def type_of(self, value: Tensor, mesh: Mesh) -> TensorType:
        said = {axis: _peer.maybe_get_axis_local_type(value, axis) for axis in mesh.axes}
        spec = None if self.local else _peer.get_partition_spec(value)
        names = {_peer.normalize_axis(axis): axis for axis in mesh.axes}
        known = {axis: t for axis, t in said.items() if t is not None}
        return from_peer(known, named_spec(spec, names), mesh)

    def says(self, t: AxisType) -> AxisType | None:
        if isinstance(t, Shard):
            if t.extent is not None and not t.extent.is_even:
                return None
            return V if self.local else t
        return t

    def can_declare(self, program: Program) -> bool:
        varies = any(t == V for x in program.inputs for _, t in x.types)
        return super().can_declare(program) and (self.local or not varies)


@contextmanager
def _patched_once() -> Generator[None]:
    """Hold the peer's patches of torch while threads enter and leave its checker.

    Each `typecheck()` of its own installs and removes them, which it says is not for
    threads: the first that leaves would unpatch the others, or leave torch patched.
    """
    inner: Any = importlib.import_module("spmd_types._checker")
    vmap: Any = importlib.import_module("spmd_types._vmap")
    hooks: Any = importlib.import_module("spmd_types._backward_hooks")
    pairs = [
        (inner, "_install_autograd_apply_patch", "_remove_autograd_apply_patch"),
        (vmap, "install", "uninstall"),
        (hooks, "install", "uninstall"),
    ]
    with ExitStack() as stack:
        for module, install, remove in pairs:
            getattr(module, install)()
            stack.callback(getattr(module, remove))
        for module, *names in pairs:
            for name in names:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, _nothing)
        yield


def _nothing() -> None:
    pass


def named_spec(spec: Any, names: Mapping[Any, str]) -> list[tuple[str, ...]]:
    """Return a PartitionSpec as the names of the axes that cut each dim."""
    return [
        tuple(names[axis] for axis in axes_of(entry))
        for entry in (() if spec is None else spec)
    ]
