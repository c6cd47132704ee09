"""Where numbers that belong to an axis come from: ranks, sizes of pieces, counts.

`axis_rank` and `global_size` are for programs. While checking is on, `dist.get_rank`,
`DeviceMesh.get_local_rank` and the sizes of a tensor that is cut say their axis too.
"""

import math
from collections.abc import Sequence
from typing import Any, SupportsIndex, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from placements._torch import unseen
from placements.inference.number_operands import chosen_by
from placements.inference.numbers import (
    RANK_NUMBERS,
    Facts,
    RankInt,
    RankNumber,
    belonging,
    numbers_in,
    plain,
)
from placements.inference.terms import Refusal
from placements.runtime import tags
from placements.runtime.callsite import located, name_of
from placements.runtime.describe import described
from placements.runtime.errors import mismatch, refused_call, type_or_error
from placements.runtime.forgotten import note_read
from placements.runtime.mesh import checked_mesh, current_mesh
from placements.runtime.state import current, suspended
from placements.types.axis import WORDS, Shard
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, identity_of


def axis_rank(axis: str) -> int:
    """Return this rank's place on a mesh axis; checked, it is a number Varying there.

    Rows chosen by it differ by rank on that axis and no other. To cut a tensor over an
    axis, `convert(x, axis, src=R, dst=S(0))` says it in one word.
    """
    mesh = checked_mesh()
    mesh.require(axis)
    return _rank(mesh.place[axis], mesh, (axis,), f"axis_rank({axis!r})")


def global_size(x: Tensor, dim: int) -> int:
    """Return the size of a dim over all ranks that cut it; a number equal on all of them.

    Needs the type of `x`, so it is for checked code and for code whose types were
    checked: with checking off, a tensor without a type raises PlacementError.
    """
    with unseen():
        known = type_or_error(x, "global_size")
        if not -x.dim() <= dim < x.dim():
            raise IndexError(
                f"global_size: dim {dim} of a tensor of shape {tuple(x.shape)}, which has "
                f"{x.dim()} dims"
            )
        return known.global_size(dim % x.dim(), x.shape[dim])


def _rank(place: int, mesh: Mesh, axes: tuple[str, ...], origin: str) -> int:
    if current.mode is None:
        return place
    letters = tuple((axis, "V") for axis in axes if axis in mesh.position)
    return belonging(place, Facts(letters, origin))


def with_plain_sizes(reduce_ex: Any) -> Any:
    """`Tensor.__reduce_ex__`: a file holds a size as a plain number, as readers expect."""

    def with_plain_sizes(self: Tensor, protocol: Any) -> Any:
        with unseen():
            tags.note_name(self)  # copy.copy makes another name for its memory
            return reduce_ex(self, protocol)

    return with_plain_sizes


def rank_of_group(rank: Any) -> Any:
    """`ProcessGroup.rank` whose result is a number of the axes along which it differs."""

    def rank_of_group(self: Any) -> int:
        return _rank_in(self, rank.__get__(self, type(self))())

    return rank_of_group


def rank_in_group(get_group_rank: Any) -> Any:
    """`get_group_rank`, which `dist.get_rank(group)` calls, with the axes of its result."""

    def rank_in_group(group: Any, global_rank: int) -> int:
        return _rank_in(group, get_group_rank(group, global_rank))

    return rank_in_group


def _rank_in(group: Any, place: int) -> int:
    mesh = current_mesh()
    if current.mode is None or mesh is None or mesh.device_mesh is None:
        return place
    with suspended():
        axes = _axes_of(group, mesh)
    return _rank(place, mesh, axes, "dist.get_rank()")


def own_coordinate(coordinate: property) -> property:
    """`Mesh.coordinate` whose results are numbers of their axes."""

    def own_coordinate(self: Mesh) -> dict[str, int]:
        places: dict[str, int] = coordinate.__get__(self, Mesh)
        return {
            axis: _rank(place, self, (axis,), f"coordinate[{axis!r}]")
            for axis, place in places.items()
        }

    return property(own_coordinate)


def local_rank(get_local_rank: Any) -> Any:
    """`DeviceMesh.get_local_rank` whose result is a number of its axis."""

    def local_rank(self: Any, mesh_dim: Any = None) -> int:
        return _place_on(self, mesh_dim, get_local_rank(self, mesh_dim))

    return local_rank


def coordinate(get_coordinate: Any) -> Any:
    """`DeviceMesh.get_coordinate` whose results are numbers of their axes."""

    def coordinate(self: Any) -> Any:
        places = get_coordinate(self)
        names = self.mesh_dim_names
        if places is None or current.mode is None or names is None:
            return places
        return [_place_on(self, *named) for named in zip(names, places, strict=True)]

    return coordinate


def _place_on(device_mesh: Any, mesh_dim: Any, place: int) -> int:
    mesh = current_mesh()
    if current.mode is None or mesh is None or mesh.device_mesh is None:
        return place
    axes = _axes_of(device_mesh.get_group(mesh_dim), mesh)
    return _rank(place, mesh, axes, f"get_local_rank({mesh_dim or ''!r})")


def _axes_of(group: Any, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which the place in a group differs, as this rank sees it."""
    assert mesh.device_mesh is not None
    members = set(dist.get_process_group_ranks(group))
    with unseen():
        found = tuple(
            axis
            for axis in mesh.axes
            if len(members & set(dist.get_process_group_ranks(mesh.group(axis)))) > 1
        )
    # A group that follows no axis: assume that every move changes the place in it.
    return found or (mesh.axes if len(members) > 1 else ())


def shape_of(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """x.shape, x.size(), x.size(dim), x.numel(): sizes know the piece they are of."""
    result = func(*args, **kwargs)
    known = tags.get(args[0])
    if known is None or known.has_plain_sizes:
        found = result
    else:
        found = _with_facts(known, result, args, kwargs)
    if known is not None and not kwargs and all(dim.__class__ is int for dim in args[1:]):
        seen = known.identity or identity_of(known), args[0].shape, args[0].dtype
        mode.keep(mode.memo, (func, seen, *args[1:]), found)
    return found


def _with_facts(known: TensorType, result: Any, args: Any, kwargs: Any) -> Any:
    if isinstance(result, torch.Size):
        return Sizes([_size(known, d, n) for d, n in enumerate(result)])
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is not None:
        return _size(known, dim % args[0].dim(), result)
    cut = tuple(axis for axis, t in known.items() if isinstance(t, Shard))
    return belonging(
        result, Facts(letters_of_sizes(known, cut), "numel()", bool(known.pads))
    )


def broadcast_sizes(broadcast_shapes: Any) -> Any:
    """`torch.broadcast_shapes` whose result knows the axes of the sizes, as they do."""

    def broadcast_sizes(*shapes: Any) -> Any:
        result = broadcast_shapes(*shapes)
        return Sizes(result) if next(numbers_in(shapes), None) is not None else result

    return broadcast_sizes


_item = cast(Any, tuple).__getitem__


class Sizes(tuple[int, ...]):
    """The sizes of a tensor; their product knows its axes as they do.

    It stands for a `torch.Size`, which cannot be derived from, and whose `numel` would make
    a plain number of them.
    """

    def numel(self) -> int:
        return math.prod(self)

    def __getitem__(self, key: Any) -> Any:
        found: Any = _item(self, key)
        return Sizes(found) if key.__class__ is slice else found

    def __add__(self, other: Any) -> Any:
        return Sizes((*self, *other))

    def __radd__(self, other: Any) -> Any:
        return Sizes((*other, *self))

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return the sizes as objects, so that `np.prod(x.shape)` knows its axes too."""
        return np.array(list(self), dtype=object if dtype is None else dtype)

    def __repr__(self) -> str:
        return f"torch.Size({[plain(n) for n in self]})"

    def __reduce__(self) -> Any:
        return torch.Size, (tuple(plain(n) for n in self),)


def length_of(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """len(x): Python makes a plain number of it, so it is refused where it differs."""
    known = tags.get(args[0])
    result = func(*args, **kwargs)
    if known is not None and _size(known, 0, result).__class__ in RANK_NUMBERS:
        name = name_of(args[0], "len") or "x"
        raise refused_call(
            "len",
            f"the first dim of {name} is cut or differs by rank, and Python makes a plain "
            "number of its length",
            name=name,
            rule="a size of this rank's piece must not be taken for the size of the whole",
            operands=[described(args[0], known)],
            advice=f"{name}.shape[0]",
        )
    return result


def letters_of_sizes(
    known: TensorType, cut: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Return the letters of a size: a summand where a dim is cut, own where it varies."""
    varying = tuple((axis, "V") for axis, t in known.items() if t.letter == "V")
    return (*((axis, "P") for axis in cut), *varying)


def _size(known: TensorType, dim: int, size: int) -> int:
    kept = (known.identity or identity_of(known)).facts
    facts = kept.get(dim)
    if facts is None:
        padded = any(dim in pads.dims for pads in known.pads)
        letters = letters_of_sizes(known, known.order(dim))
        facts = kept[dim] = Facts(letters, f"shape[{dim}]", padded, known.cuts(dim))
    return belonging(size, facts)


def numbers_read(read: Sequence[Tensor], value: Any) -> Any:
    """Return a value that `item()`, `tolist()` or a branch reads, with its axes.

    A bool cannot know its axes, so that a program reads one is noted as a question.
    """
    types = [known for known in map(tags.get, read) if known is not None]
    differing = [a for known in types for a, t in known.items() if t.letter in "VS"]
    letters = tuple((axis, "V") for axis in dict.fromkeys(differing))
    if not letters:
        return value
    if isinstance(value, bool):
        name = name_of(read[0]) or "a tensor"
        note_read(RankInt(value, Facts(letters, f"the value of {name}")), value)
    return _belonging_to(letters, value)


def _belonging_to(letters: tuple[tuple[str, str], ...], value: Any) -> Any:
    if isinstance(value, list):
        return [_belonging_to(letters, item) for item in cast(Any, value)]
    return belonging(value, Facts(letters, "item()"))


class Pieces(tuple[Any, ...]):
    """The parts that an op returned; `parts[rank]` is chosen by the rank."""

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)  # a file must not need this package

    def __getitem__(self, key: SupportsIndex | slice) -> Any:
        part: Any = super().__getitem__(key)
        numbers = list(numbers_in(key)) if current.mode is not None else []
        if not isinstance(key, slice):
            return _chosen(part, numbers[0]) if numbers else part
        for number in numbers:
            part = [_chosen(one, number) for one in part]
        return Pieces(part)


def _chosen(part: Tensor, number: RankNumber) -> Tensor:
    known = tags.get(part)
    if known is None:
        return part
    try:
        found = chosen_by(known, number)
    except Refusal as refusal:
        axis = refusal.axis
        assert axis is not None
        raise mismatch(
            located("parts[...]"), f"the part chosen by {number.facts.origin}", axis,
            "Replicate", WORDS[known[axis].letter], rule=refusal.reason,
            operands=[described(part)],
        ) from None  # fmt: skip
    with unseen():
        another_name = part.view_as(part)
    tags.put(another_name, found)
    return another_name
