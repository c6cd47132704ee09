"""Sizes that know their piece: what a constant is whose sizes were read from tensors.

`x.shape[0]` of a dim that is cut is this rank's part of a size. Where values do not depend
on their place (zeros, ones, full, expand), rank r then holds the r-th piece of what the
same line makes on one device, so the new dim is cut as the old one is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from placements.inference.numbers import facts_of
from placements.inference.rules import DIM_REASONS
from placements.inference.terms import Operand, Refusal
from placements.types.axis import AxisType, R, Shard, V
from placements.types.index import Cuts
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType, make


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
    """One size, several, or those of a tensor that stands for its shape."""
    if isinstance(given, Operand):
        varying = tuple(axis for axis, t in given.type.items() if t == V)
        return [Size(n, given.type.cuts(d), varying) for d, n in enumerate(given.shape)]
    numbers = cast(Sequence[Any], given if isinstance(given, list | tuple) else (given,))
    return [_size(number) for number in numbers]


def _size(number: Any) -> Size:
    facts = facts_of(number)
    cut = {axis for axis, _ in facts.cuts}
    varying = tuple(axis for axis, _ in facts.letters if axis not in cut)
    return Size(int(number), facts.cuts, varying)


def type_of_sizes(mesh: Mesh, sizes: Iterable[Size], fresh: str | None) -> TensorType:
    """The type of one number in every place of a tensor of these sizes."""
    types: dict[str, AxisType] = {}
    for dim, size in enumerate(sizes):
        for axis, extent in size.cuts:
            if isinstance(types.get(axis), Shard):
                raise Refusal(DIM_REASONS["other dim"], axis, None, "sizes of one cut dim")
            if axis in mesh.position:
                types.setdefault(axis, Shard(dim, extent))
        types |= {axis: V for axis in size.varying if axis in mesh.position}
    rest: dict[str, AxisType] = {axis: R for axis in mesh.axes if axis not in types}
    return make(mesh, {**types, **rest}, fresh=fresh)
