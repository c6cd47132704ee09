"""Which rows of a tensor are padding, and what those rows hold: data only.

A mask says which rows are valid. A tensor with rows of padding has a `Pads`: the mask, the
dims that the mask runs over, and what the rows of padding hold, if that is known. A mask
is described in the same way: it is a tensor of bools whose rows of padding hold False.
"""

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Validity:
    """A mask, by name, in the order of its elements.

    `name` is ("first", n) if the first n rows are valid: masks of that name are equal
    wherever they are made. Other masks have a number of their own. Each element stands for
    `inner` neighbours, and the whole is repeated `outer` times, as flattening makes it.
    """

    name: int | tuple[object, ...]
    outer: int = 1
    inner: int = 1

    @classmethod
    def of_first(cls, rows: int) -> "Validity":
        return cls(("first", rows))

    @classmethod
    def new(cls) -> "Validity":
        return cls(next(_numbers))

    def __str__(self) -> str:
        name = self.name
        while isinstance(name, tuple) and name[0] == "piece":
            name = cast(Any, name[1])
        return f"first {name[1]} valid" if isinstance(name, tuple) else f"mask {name}"

    @property
    def first(self) -> int | None:
        """How many rows are valid, if they are the first ones."""
        if isinstance(self.name, tuple) and self.outer == self.inner == 1:
            kind, rows, *_ = self.name
            return cast(int, rows) if kind == "first" else None
        return None

    def piece(self, axis: str, extent: Hashable) -> "Validity":
        """Return the mask of each rank's piece, when nothing else says how it is cut."""
        return replace(self, name=("piece", self.name, axis, extent))


@dataclass(frozen=True)
class Pads:
    """Rows of padding: by which mask, over which dims, and what they hold.

    `dims` are in the order of the mask's dims. If `holds` is None, the rows may hold
    anything.
    """

    validity: Validity
    dims: tuple[int, ...]
    holds: int | None = None

    def __str__(self) -> str:
        held = "" if self.holds is None else f" with {self.holds}"
        return f"padded{held} in {self.where}"

    @property
    def where(self) -> str:
        """`dim 0 (first 5 valid)`."""
        return f"dim {', '.join(map(str, self.dims))} ({self.validity})"

    def mask(self, ndim: int) -> str:
        """Return the mask as code, broadcast against a tensor of `ndim` dims."""
        valid = "valid"
        if self.validity.inner > 1:
            valid += f".repeat_interleave({self.validity.inner})"
        if self.validity.outer > 1:
            valid += f".repeat({self.validity.outer})"
        key = [":" if d in self.dims else "None" for d in range(min(self.dims), ndim)]
        return valid if "None" not in key else f"{valid}[{', '.join(key)}]"


def print_pads(pads: Sequence[Pads]) -> str:
    """`, padded in dim 0 (mask 1)`, for the end of a printed type; else nothing."""
    return "".join(f", {one}" for one in pads)


# Dims of an old shape, and the dims of the new one that they become together.
Groups = list[tuple[tuple[int, ...], tuple[int, ...]]]


def regrouped(
    pads: Pads,
    old: Sequence[int],
    new: Sequence[int],
    groups: Groups,
    cut: Sequence[int],
) -> Pads | None:
    """Return the pads after a reshape that turns each group of old dims into new ones.

    `cut`: the old dims of which this rank holds a piece. None if the mask is no view of
    what it was: then nothing can be said.
    """
    inside = [group for group in groups if set(group[0]) & set(pads.dims)]
    if all(len(olds) == len(news) == 1 for olds, news in inside):
        to = {olds[0]: news[0] for olds, news in inside}
        return replace(pads, dims=tuple(to[dim] for dim in pads.dims))
    if len(inside) != 1 or set(inside[0][0]) & set(cut) - set(pads.dims):
        return None
    olds, news = inside[0]
    run = [olds.index(dim) for dim in pads.dims]
    if run != list(range(run[0], run[0] + len(run))):
        return None
    before = math.prod(old[d] for d in olds[: run[0]])
    after = math.prod(old[d] for d in olds[run[-1] + 1 :])
    if 0 in (before, after):
        return None
    outer, inner = before * pads.validity.outer, after * pads.validity.inner
    for first, last in _runs(len(news)):
        head = math.prod(new[d] for d in news[:first])
        tail = math.prod(new[d] for d in news[last:])
        if (head, tail) == (outer, inner):
            plain = replace(pads.validity, outer=1, inner=1)
            return Pads(plain, tuple(news[first:last]), pads.holds)
    if len(news) != 1:
        return None
    return Pads(replace(pads.validity, outer=outer, inner=inner), news, pads.holds)


def _runs(count: int) -> Iterator[tuple[int, int]]:
    """Yield every run of neighbours among `count` dims, the shortest first."""
    for length in range(1, count + 1):
        for first in range(count - length + 1):
            yield first, first + length


def repeated(pads: Pads, dim: int, times: int) -> Pads | None:
    """Return the pads after every row of `dim` was repeated in place."""
    if dim not in pads.dims:
        return pads
    if len(pads.dims) > 1 or times < 1:
        return None
    validity = replace(pads.validity, inner=pads.validity.inner * times)
    return replace(pads, validity=validity)
