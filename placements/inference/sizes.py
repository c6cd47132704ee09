"""Sizes that know their piece: what a constant is whose sizes were read from tensors.

`x.shape[0]` of a dim that is cut is this rank's part of a size. Where values do not depend
on their place (zeros, ones, full, expand), rank r then holds the r-th piece of what the
same line makes on one device, so the new dim is cut as the old one is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from placements.inference.numbers import facts_of, plain
from placements.inference.rules import DIM_REASONS
from placements.inference.terms import Operand, Refusal
from placements.types.axis import AxisType, R, Shard, V
from placements.types.index import Cuts
from placements.types.mesh import Mesh
from placements.types.tensor import EMPTY, ZERO, TensorType, make


@dataclass(frozen=True)
class Size:
    """A size as it was written: its number here, and what it was read from.

    `cuts`: the cuts of the dim of which it is the size. `varying`: the axes on which it is
    each rank's own number.
    """

    rows: int
    cuts: Cuts = ()
    varying: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        return not (self.cuts or self.varying)


def sizes_of(given: Any) -> list[Size]:
    """Return one size, several, or those of a tensor that stands for its shape."""
    if isinstance(given, Operand):
        varying = tuple(axis for axis, t in given.type.items() if t == V)
        return [Size(n, given.type.cuts(d), varying) for d, n in enumerate(given.shape)]
    numbers = cast(Sequence[Any], given if isinstance(given, list | tuple) else (given,))
    return [_size(number) for number in numbers]


def _size(number: Any) -> Size:
    if isinstance(number, Size):
        return number
    facts = facts_of(number)
    cut = {axis for axis, _ in facts.cuts}
    varying = tuple(axis for axis, _ in facts.letters if axis not in cut)
    return Size(int(plain(number)), facts.cuts, varying)


def is_foreign(size: Size, mesh: Mesh) -> bool:
    """Return whether the size was read on another presentation of the ranks.

    Nothing tells on which axes of this mesh such a size differs, so it may on all of them.
    """
    return any(axis not in mesh.position for axis in (*dict(size.cuts), *size.varying))


def as_zeros(input: Operand) -> Operand:
    """Return memory that nobody wrote as zeros, of which the next write makes something."""
    if input.type.fresh != EMPTY:
        return input
    return replace(input, type=filled_anew(input, ZERO))


def filled_anew(input: Operand, fill: str) -> TensorType:
    """Return the type of a factory's tensor that one number fills: that of its sizes."""
    sizes = sizes_of(input)
    if input.type.fresh == EMPTY:  # it differed by rank in what it held, not in its sizes
        sizes = [Size(size.rows, size.cuts) for size in sizes]
    return type_of_sizes(input.type.mesh, sizes, fill)


def type_of_sizes(mesh: Mesh, sizes: Iterable[Size], fresh: str | None) -> TensorType:
    """Return the type of one number in every place of a tensor of these sizes."""
    types: dict[str, AxisType] = {}
    sizes = list(sizes)
    if any(is_foreign(size, mesh) for size in sizes):
        return make(mesh, {axis: V for axis in mesh.axes}, fresh=fresh)
    for dim, size in enumerate(sizes):
        for axis, extent in size.cuts:
            if isinstance(types.get(axis), Shard):
                raise Refusal(DIM_REASONS["other dim"], axis, None, "sizes of one cut dim")
            types.setdefault(axis, Shard(dim, extent))
        types |= {axis: V for axis in size.varying}
    for size in sizes:
        # The outer pieces are made of the inner ones, so they go when those are lost.
        lost = [k for k, (axis, _) in enumerate(size.cuts) if types[axis] == V]
        types |= {axis: V for axis, _ in size.cuts[: max(lost, default=0)]}
    rest: dict[str, AxisType] = {axis: R for axis in mesh.axes if axis not in types}
    return make(mesh, {**types, **rest}, fresh=fresh)
