"""Meshes: axis names, sizes, this rank's coordinate, and the groups if there are any.

A mesh is a `DeviceMesh`, or names and sizes alone. With sizes alone nothing can
communicate, and the checks see the mesh from one coordinate (the first by default).
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import count, product
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from placements._torch import require, unseen, watch_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Names of axes that are used together, and of which meshes may leave some out.
_families: set[frozenset[str]] = set()


def optional_axes(*axes: str) -> None:
    """Say that meshes with some of these axes may leave the others out.

    A type on an axis that the mesh does not have is an error otherwise, because a name
    that is mistyped would check nothing. A package that annotates for (dp, cp, tp) and
    runs without cp, too, says so once, where it is imported:
    `optional_axes("dp", "cp", "tp")`. On a mesh with none of these axes, they are unknown.
    """
    for axis in axes:
        if not axis.isidentifier():
            raise ValueError(f"optional_axes: {axis!r} must be a name such as 'cp'")
    if len(set(axes)) < 2:
        raise ValueError(
            f"optional_axes{axes!r}: name the axis together with those that it is used "
            "with, such as optional_axes('dp', 'cp', 'tp')"
        )
    _families.add(frozenset(axes))


def unknown_axis(
    mesh: "Mesh", axes: Iterable[str], around: Iterable["Mesh"] = ()
) -> str | None:
    """Say what is wrong with the first axis that is not known; None if all are known.

    An axis is known if the mesh has it, or a mesh `around` it over equally many ranks
    (another presentation of the mesh), or if it is used together with an axis of the mesh.
    A mesh without axes is one device, where no type says anything.
    """
    unknown = [axis for axis in axes if axis not in mesh.sizes]
    if not unknown or not mesh.sizes:
        return None
    presentations = [m for m in around if m.num_ranks == mesh.num_ranks]
    one_rank = not mesh.axes
    families = [f for f in _families if one_rank or f & mesh.sizes.keys()]
    known = {*mesh.sizes}.union(*(m.sizes for m in presentations), *families)
    for axis in unknown:
        if axis in known:
            continue
        return (
            f"names axis {axis!r}, which {mesh!r} does not have.{_meant(axis, known)} If "
            "the axis is one of another mesh, make that mesh current where the module is "
            "called. If some meshes leave the axis out, call "
            f"optional_axes({axis!r}, ...) with the axes that it is used with"
        )
    return None


def _meant(axis: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # imported late: only mistakes need it

    close = get_close_matches(axis, sorted(known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


class Mesh:
    """Named axes over ranks, seen from one rank."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        coordinate: Mapping[str, int] | None = None,
        device_mesh: "DeviceMesh | None" = None,
    ) -> None:
        for axis, size in sizes.items():
            if not axis.isidentifier():
                raise ValueError(f"mesh axis {axis!r} must be a name such as 'tp'")
            if size < 1:
                raise ValueError(f"mesh axis {axis!r} has size {size}, must be >= 1")
        self.sizes: dict[str, int] = dict(sizes)
        self.place: dict[str, int] = {
            axis: (coordinate or {}).get(axis, 0) for axis in self.sizes
        }
        for axis, place in self.place.items():
            if not 0 <= place < self.sizes[axis]:
                raise ValueError(
                    f"coordinate {place} on mesh axis {axis!r} must lie in "
                    f"0..{self.sizes[axis] - 1}"
                )
        self.device_mesh = device_mesh
        # Of a DeviceMesh it is read once: reading a tensor takes longer the more ranks
        # there are, and `reinterpret_mesh` asks in every step.
        self._order = None if device_mesh is None else _ranks_of(device_mesh)
        # Axes of size 1 carry no information: types leave them out.
        self.axes: tuple[str, ...] = tuple(a for a, n in self.sizes.items() if n > 1)
        self.position: dict[str, int] = {a: i for i, a in enumerate(self.axes)}
        self.key = (
            tuple(self.sizes.items()),
            tuple(self.place.values()),
            id(device_mesh) if device_mesh is not None else None,
        )
        self._hash = hash(self.key)
        # What was inferred on this mesh, to be used again: by calls, and by calls without
        # their sizes. It holds types, which hold the mesh, so it must be freed together
        # with the mesh.
        self.inferred: dict[Any, Any] = {}
        self.templates: dict[Any, Any] = {}
        # DeviceMeshes of the same ranks that were made of this one, to be used again.
        self.regrouped: dict[Any, DeviceMesh] = {}
        self.identities: dict[Any, Any] = {}

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mesh) and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Mesh, (self.sizes, self.place, self.device_mesh)

    def __deepcopy__(self, memo: object) -> "Mesh":
        return self  # ranks and groups are not copied with a module that names them

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={n}' for axis, n in self.sizes.items())})"

    @property
    def coordinate(self) -> dict[str, int]:
        """This rank's place on every axis.

        While checking is on these are numbers that belong to their axes, because a program
        that asks for its rank is watched. The package itself asks for `place`.
        """
        return dict(self.place)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    def require(self, axis: str) -> int:
        """Return the size of `axis`; ValueError if the mesh has no such axis."""
        if axis not in self.sizes:
            known = ", ".join(f"{a}={n}" for a, n in self.sizes.items()) or "none"
            raise ValueError(
                f"the current mesh has no axis {axis!r} (it has {known})."
                f"{_meant(axis, self.sizes)} "
                f"An axis that is not split has size 1: {{{axis!r}: 1, ...}}"
            )
        return self.sizes[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group of `axis`; None on a mesh of sizes alone."""
        self.require(axis)
        return None if self.device_mesh is None else self.device_mesh.get_group(axis)

    def coordinates(self) -> list[dict[str, int]]:
        """Return every rank's coordinate, in rank order (the last axis runs fastest)."""
        places = product(*(range(n) for n in self.sizes.values()))
        return [dict(zip(self.sizes, place, strict=True)) for place in places]

    def seen_from(self, coordinate: Mapping[str, int]) -> "Mesh":
        """Return the same mesh as another rank sees it; sizes alone."""
        return Mesh(self.sizes, coordinate)

    def rank(self) -> int:
        """Return the global rank that sees the mesh so."""
        number = 0
        for axis, size in self.sizes.items():
            number = number * size + self.place[axis]
        return self.rank_order()[number]

    def rank_order(self) -> tuple[int, ...]:
        """Return the global ranks, row-major; what two presentations must share."""
        return tuple(range(self.num_ranks)) if self._order is None else self._order


def _ranks_of(mesh: "DeviceMesh") -> tuple[int, ...]:
    """Return the global ranks of a DeviceMesh, row-major."""
    with unseen():
        ranks: list[int] = cast(Any, mesh.mesh.flatten()).tolist()
    return tuple(ranks)


# What is taken where a mesh is expected; `as_mesh` makes a Mesh of it.
MeshLike: TypeAlias = "Mesh | DeviceMesh | Mapping[str, int]"

# A DeviceMesh is looked up by identity at every `set_current_mesh`; its Mesh is kept on
# the object itself so that types made under it stay comparable.
_ATTRIBUTE = "_placements_mesh"


class _Kept:
    """Holds the Mesh of a DeviceMesh, and leaves it out when that is pickled.

    A DTensor is saved with its DeviceMesh, and the file must load without this package.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()  # anything plain that `weights_only=True` lets in


@lru_cache(maxsize=64)
def _mesh_of_sizes(sizes: tuple[tuple[str, int], ...]) -> Mesh:
    """Return one Mesh for equal sizes, so that what was inferred on it is found again."""
    return Mesh(dict(sizes))


def as_mesh(mesh: "MeshLike") -> Mesh:
    """Make a Mesh from one, from names and sizes, or from a DeviceMesh with names."""
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, Mapping):
        if torch.compiler.is_dynamo_compiling():  # nothing is kept of what is traced
            return Mesh(mesh)
        return _mesh_of_sizes(tuple(mesh.items()))
    known = getattr(mesh, _ATTRIBUTE, None)
    if isinstance(known, _Kept):
        return known.mesh
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None:
        raise ValueError(
            "a mesh is a DeviceMesh with mesh_dim_names, or a mapping such as "
            f"{{'dp': 2, 'tp': 4}}; got {mesh!r}"
        )
    with unseen():  # a mesh is first met inside typecheck() too, and holds tensors
        place, shape = mesh.get_coordinate(), tuple(mesh.mesh.shape)
    if place is None:
        raise ValueError("this rank is not part of the DeviceMesh")
    made = Mesh(
        dict(zip(names, shape, strict=True)),
        dict(zip(names, map(int, place), strict=True)),
        mesh,
    )
    setattr(mesh, _ATTRIBUTE, _Kept(made))
    _live[next(_count)] = made
    require("sharding")
    watch_groups()  # from here on parameters may be sharded over ranks that have types
    return made


_live: "WeakValueDictionary[int, Mesh]" = WeakValueDictionary()
_count = count()


def live_meshes() -> list[Mesh]:
    """Return the meshes of DeviceMeshes that this rank has met, newest first."""
    here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return [mesh for _, mesh in sorted(_live.items(), reverse=True) if mesh.rank() == here]
