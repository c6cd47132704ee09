"""The names of `spmd_types` over this package: change the import, and our checker checks.

    from placements.interop import spmd  # was: import spmd_types as spmd

Types, calls and declarations are ours under the peer's names and arguments. What has no
sound meaning here is refused by name when it is used, and `spmd_refused.py` says what to
write in its place. `spmd_types` itself need not be installed.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

import placements as pl
from placements import I as I
from placements import Invariant as Invariant
from placements import P as P
from placements import Partial as Partial
from placements import R as R
from placements import Replicate as Replicate
from placements import S as S
from placements import Shard as Shard
from placements import V as V
from placements import Varying as Varying
from placements._torch import pytree, unseen
from placements.interop.spmd_calls import all_gather as all_gather
from placements.interop.spmd_calls import all_reduce as all_reduce
from placements.interop.spmd_calls import all_to_all as all_to_all
from placements.interop.spmd_calls import convert as convert
from placements.interop.spmd_calls import invariant_to_replicate as invariant_to_replicate
from placements.interop.spmd_calls import redistribute as redistribute
from placements.interop.spmd_calls import reduce_scatter as reduce_scatter
from placements.interop.spmd_calls import reinterpret as reinterpret
from placements.interop.spmd_calls import shard as shard
from placements.interop.spmd_calls import unshard as unshard
from placements.interop.spmd_refused import REFUSED as REFUSED
from placements.runtime.state import current, suspended
from placements.types.axis import AxisType


def __getattr__(name: str) -> Any:
    if name in REFUSED:
        raise _refused(name)
    raise AttributeError(f"placements.interop.spmd has no {name!r}")


def _refused(name: str) -> NotImplementedError:
    why, instead = REFUSED[name]
    return NotImplementedError(
        f"spmd_types.{name} is not offered here: {why}. Write instead: {instead}"
    )


SpmdTypeError = pl.PlacementError
current_mesh = pl.current_mesh
# What annotations of a program may name.
PerMeshAxisLocalSpmdType = PerMeshAxisSpmdType = AxisType
LocalSpmdType = PerMeshAxisSpmdTypes = Mapping[str, AxisType]


class PartitionSpec(tuple[Any, ...]):
    """For each dim of a tensor the axis that cuts it, or a tuple of axes, or None."""

    __slots__ = ()

    def __new__(cls, *entries: Any) -> "PartitionSpec":
        return super().__new__(cls, entries)


class Infer:
    """`in_types=Infer`: what the arguments of a `local_map` are is not said."""


def _merged(ndim: int, types: Sequence[Any], spec: Any) -> dict[str, AxisType]:
    """Return what the arguments of `assert_type` say: cuts in order, then the rest."""
    said: dict[str, AxisType] = {}
    rest: AxisType | None = None
    for one in types:
        if isinstance(one, PartitionSpec):
            spec = one
        elif isinstance(one, AxisType):
            rest = one
        elif one is not None:
            given = cast(Mapping[Any, AxisType], one)
            said |= {_name(axis): t for axis, t in given.items()}
    if spec is not None and len(spec) != ndim:
        raise ValueError(f"{spec!r} is for {len(spec)} dims, the tensor has {ndim}")
    cuts: dict[str, AxisType] = {}
    for dim, entry in enumerate(cast(Sequence[Any], spec or ())):
        for axis in axes_of(entry):
            if said.get(_name(axis), V) != V:
                raise ValueError(f"{said[axis]!r} on {axis!r}, yet {spec!r} cuts over it")
            cuts[_name(axis)] = Shard(dim)
    mesh = pl.current_mesh()
    if rest is not None and mesh is not None:
        said = {axis: rest for axis in mesh.axes if axis not in cuts} | said
    return cuts | {axis: t for axis, t in said.items() if axis not in cuts}


def axes_of(entry: Any) -> tuple[Any, ...]:
    """Return the axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    return cast(tuple[Any, ...], entry) if isinstance(entry, tuple) else (entry,)


def _name(axis: Any) -> str:
    """Return the name of an axis that is given by name or by its process group."""
    if isinstance(axis, str):
        return axis
    mesh = pl.current_mesh()
    for name in mesh.sizes if mesh is not None and mesh.device_mesh is not None else ():
        if isinstance(axis, dist.ProcessGroup) and mesh is not None:
            if mesh.group(name) is axis:
                return name
    raise _refused("MeshAxis")


def assert_type(x: Any, *types: Any, partition_spec: Any = None) -> Any:
    """Declare a tensor, or check one: axes that are not named stay as they are.

    As in `spmd_types` Varying says less than a Shard, so it fits one. The first
    declaration names every axis of the mesh.
    """
    if isinstance(x, list | tuple):
        several = [
            assert_type(one, *types, partition_spec=partition_spec)
            for one in cast(Sequence[Any], x)
        ]
        return several if isinstance(x, list) else tuple(several)
    said = _merged(x.dim(), types, partition_spec)
    known = pl.type_of(x)
    if known is None or known.fresh is not None:
        return pl.assert_type(x, said)
    given = dict(known)
    for axis, t in said.items():
        if axis in given and not (t == V and isinstance(given[axis], Shard)):
            given[axis] = t
    # In the order in which the tensor is cut, unless the declaration says another.
    named = [axis for axis, t in said.items() if isinstance(t, Shard)]
    order = [*named, *(axis for axis in given if axis not in named)] if named else given
    return pl.assert_type(x, {axis: given[axis] for axis in order if axis in given})


assert_local_type = assert_type


def assert_type_like(x: Tensor, source: Tensor, overrides: Any = None) -> None:
    """Declare a tensor to be what another one is, but for some axes."""
    assert_type(x, {**(pl.type_of(source) or {}), **(overrides or {})})


assert_local_type_like = assert_type_like


def has_local_type(x: Tensor) -> bool:
    return pl.type_of(x) is not None


def get_local_type(x: Tensor) -> dict[str, AxisType]:
    """Return the types of a tensor with V for each Shard, as `spmd_types` has them."""
    known = pl.type_of(x)
    if known is None:
        raise AttributeError("the tensor has no type")
    return {axis: V if isinstance(t, Shard) else t for axis, t in known.items()}


def maybe_get_axis_local_type(x: Tensor, axis: Any) -> AxisType | None:
    known = pl.type_of(x)
    found = None if known is None else known.get(_name(axis))
    return V if isinstance(found, Shard) else found


def get_axis_local_type(x: Tensor, axis: Any) -> AxisType:
    return get_local_type(x)[_name(axis)]


def reinterpret_no_grad(x: Tensor, axis: Any, *, dst: AxisType) -> Tensor:
    """R -> I or I -> R of a tensor that no gradient flows to."""
    if x.requires_grad:
        raise ValueError("reinterpret_no_grad takes a tensor that wants no gradient")
    known = pl.type_of(x)
    return pl.convert(x, axis, src=dst if known is None else known[_name(axis)], dst=dst)


def reinterpret_mesh(x: Tensor, types: Any, *, inplace: bool = False) -> Tensor:
    """Present a tensor on a mesh, or on the current one, of which types are given."""
    if inplace:
        raise NotImplementedError("reinterpret_mesh: no inplace; it gives a view")
    if not isinstance(types, Mapping):
        return pl.reinterpret_mesh(x, types)
    mesh = pl.current_mesh()
    assert mesh is not None, "reinterpret_mesh needs a current mesh"
    return assert_type(pl.reinterpret_mesh(x, mesh), types)


def set_current_mesh(mesh: Any, *, local_axes: Sequence[str] = ()) -> Any:
    """Make a mesh current; on which axes tensors are local is said by their types here."""
    if local_axes:
        raise NotImplementedError(
            "set_current_mesh: no local_axes; values that are unrelated are V on the axis"
        )
    return pl.set_current_mesh(mesh)


def is_type_checking() -> bool:
    return current.mode is not None


class _TypeChecking:
    """`TYPE_CHECKING`: true while a checker is on."""

    def __bool__(self) -> bool:
        return is_type_checking()


TYPE_CHECKING = _TypeChecking()


def typecheck(strict_mode: str | None = None, local: bool | None = None) -> Any:
    """Check inside, by our checker: it follows dims, so local and global mode are one."""
    if strict_mode == "permissive":
        raise NotImplementedError(
            "typecheck: no permissive mode; a tensor without a type is declared, or stays "
            "in a region or in no_typecheck()"
        )
    return pl.typecheck()


@contextmanager
def _off() -> Generator[None]:
    with unseen(), suspended():
        yield


def no_typecheck(fn: Any = None, /, *, out_types: Any = None, in_types: Any = None) -> Any:
    """Check nothing inside; results have no type but what `out_types` says."""
    if out_types is None and in_types is None:
        return _off() if fn is None else _off()(fn)

    def decorated(body: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(body)
        def call(*args: Any, **settings: Any) -> Any:
            _each(args, in_types, _declared)
            with _off():
                result = body(*args, **settings)
            return _each(result, out_types, _declared)

        return call

    return decorated if fn is None else decorated(fn)


def local_map(*, out_types: Any, in_types: Any = Infer) -> Callable[..., Any]:
    """Run a body on each rank's own values: every Shard is a Varying inside.

    `out_types` says what comes out. A Varying is taken for a Shard by its word; a sum has
    to be made one in the body, by reinterpret(V -> P).
    """

    def decorated(body: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(body)
        def call(*args: Any, **settings: Any) -> Any:
            if current.mode is None:
                return body(*args, **settings)
            if in_types is not Infer:
                _each(args, in_types, _declared)
            own, named = pytree.tree_map(_own, (args, settings))
            return _each(body(*own, **named), out_types, _claimed)

        return call

    return decorated


def _own(x: Any) -> Any:
    """Return a value as this rank's own: Varying where it is a piece, outermost first."""
    known = pl.type_of(x) if isinstance(x, Tensor) else None
    for axis, t in known.items() if known is not None else ():
        if isinstance(t, Shard):
            x = pl.reinterpret(x, axis, src=t, dst=V)
    return x


def _each(values: Any, types: Any, do: Callable[[Tensor, Any], Tensor]) -> Any:
    """Do something with each tensor and what is said of it; there is one, or several."""
    if isinstance(values, Tensor):
        return do(values, types)
    if not isinstance(values, list | tuple):
        return values
    several, every = cast(Sequence[Any], values), types
    if not isinstance(types, list | tuple):
        every = [types] * len(several)
    return tuple(_each(x, t, do) for x, t in zip(several, every, strict=True))


def _declared(x: Tensor, types: Any) -> Tensor:
    return x if types is None else assert_type(x, *_parts(types))


def _claimed(x: Tensor, types: Any) -> Tensor:
    """Return a result as it is said to be."""
    said = _merged(x.dim(), _parts(types), None)
    known = pl.type_of(x)
    if known is None:
        return pl.assert_type(x, said)
    for axis, t in reversed(said.items()):  # from the innermost cut
        if isinstance(t, Shard) and known.get(axis) == V:
            x = pl.reinterpret(x, axis, src=V, dst=t)
    return assert_type(x, said)


def _parts(types: Any) -> tuple[Any, ...]:
    if isinstance(types, tuple) and not isinstance(types, PartitionSpec):
        return cast(tuple[Any, ...], types)
    return (types,)
