"""Operands: global values, their types, and what each rank of a small mesh holds."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from placements.types.axis import AxisType, I, P, R, Shard, V, dual
from placements.types.extents import Even, Padded
from placements.types.index import Index
from placements.types.meaning import join, split

# A place on some axes of a mesh, such as (("a", 1),).
Place = tuple[tuple[str, int], ...]


def places(sizes: Mapping[str, int], axes: Sequence[str]) -> Iterator[Place]:
    """Yield every place on those axes, row-major in the order of the mesh."""
    kept = [axis for axis in sizes if axis in axes]
    for place in product(*(range(sizes[axis]) for axis in kept)):
        yield tuple(zip(kept, place, strict=True))


def on(place: Place, axes: Sequence[str]) -> Place:
    return tuple((axis, at) for axis, at in place if axis in axes)


def varying(types: Mapping[str, AxisType]) -> list[str]:
    return [axis for axis, t in types.items() if t is V]


@dataclass
class FormOperand:
    """A tensor of a form: by place on the axes where it is Varying, its global value."""

    name: str
    types: dict[str, AxisType]
    values: dict[Place, Tensor]
    locals: dict[Place, Tensor] = field(default_factory=lambda: dict[Place, Tensor]())
    index: Index | None = None
    takes_gradient: bool = True  # torch takes some arguments only if they take none

    @property
    def ndim(self) -> int:
        return next(iter(self.values.values())).dim()

    @property
    def uneven(self) -> list[str]:
        """The axes of its cuts, if ranks hold pieces of other shapes."""
        if len({piece.shape for piece in self.locals.values()}) < 2:
            return []
        return [axis for axis, t in self.types.items() if isinstance(t, Shard)]

    def value_at(self, place: Place) -> Tensor:
        return self.values[on(place, varying(self.types))]


def place_value(
    values: Mapping[Place, Tensor],
    types: Mapping[str, AxisType],
    sizes: Mapping[str, int],
    rng: random.Random,
    natural: bool = False,
) -> dict[Place, Tensor]:
    """Global values -> what each rank holds; a Partial's summands are drawn anew.

    Of `natural` numbers, no summand is negative.
    """
    apart = varying(types)
    summed = [axis for axis, t in types.items() if t is P]
    cut = {axis: R if t is V or t is P else t for axis, t in types.items()}
    ranks = list(places(sizes, list(sizes)))
    held: dict[Place, Tensor] = {}
    for where, value in values.items():
        summands = list(places(sizes, summed))
        rest = value
        for summand in summands:
            part = rest
            if summand != summands[-1]:
                part = _parts(rest, rng) if natural else _noise(value, rng)
                rest = rest - part
            pieces = split(part, cut, sizes)
            for rank, piece in zip(ranks, pieces, strict=True):
                if on(rank, apart) == where and on(rank, summed) == summand:
                    held[rank] = piece
    return held


def _noise(like: Tensor, rng: random.Random) -> Tensor:
    """Summands, mostly not whole, so that rounding them shows; their sums are exact."""
    numbers: list[float] = [rng.randint(-3, 4) for _ in range(like.numel())]
    if like.is_floating_point():
        numbers = [number + rng.choice((0, 0.25, 0.5)) for number in numbers]
    return torch.tensor(numbers, dtype=like.dtype).reshape(like.shape)


def _parts(whole: Tensor, rng: random.Random) -> Tensor:
    """Summands of numbers that are not negative, which are not negative either."""
    numbers = [rng.randint(0, int(number)) for number in whole.flatten()]
    return torch.tensor(numbers, dtype=whole.dtype).reshape(whole.shape)


def join_value(
    held: Mapping[Place, Tensor], types: Mapping[str, AxisType], sizes: Mapping[str, int]
) -> dict[Place, Tensor]:
    """What each rank holds -> the global value, by place on the Varying axes.

    Raises ValueError where the ranks hold something else than the type says.
    """
    apart = varying(types)
    rest = {axis: size for axis, size in sizes.items() if axis not in apart}
    said = {axis: t for axis, t in types.items() if axis in rest}
    joined: dict[Place, Tensor] = {}
    for where in places(sizes, apart):
        group = [
            held[rank] for rank in places(sizes, list(sizes)) if on(rank, apart) == where
        ]
        shapes = {tuple(piece.shape) for piece in group}
        if not any(isinstance(t, Shard) for t in said.values()) and len(shapes) > 1:
            raise ValueError(f"the ranks hold pieces of shapes {sorted(shapes)}")
        joined[where] = join(group, said, rest) if rest else group[0]
    return joined


def dual_types(types: Mapping[str, AxisType]) -> dict[str, AxisType]:
    return {axis: dual(t) for axis, t in types.items()}


THEMES = {"S": 44, "P": 14, "V": 12, "I": 6, "R": 6, "any": 18}


class Types:
    """Draws the types of the operands of one form, so that many forms are consistent.

    Each axis has a theme. "S": one letter of the shapes is cut wherever it occurs. "P",
    "V": some operands are, the others are R. "any": each has a type of its own.
    """

    def __init__(self, rng: random.Random, sizes: Mapping[str, int], letters: str) -> None:
        self.rng, self.sizes = rng, sizes
        self.themes = {
            axis: rng.choices(list(THEMES), weights=list(THEMES.values()))[0]
            for axis in sizes
        }
        self.cut = {axis: rng.choice(letters or "A") for axis in sizes}
        self.every = rng.random() < 0.5
        self.order = rng.sample(list(sizes), len(sizes))
        self.count = 0
        self.strays = 0.06

    def draw(
        self, letters: str, shape: Sequence[int], is_odd: bool = False
    ) -> dict[str, AxisType]:
        """Return the types of one operand; an odd one mostly does not follow the themes."""
        self.count += 1
        self.strays = 0.5 if is_odd else 0.06
        made: dict[str, AxisType] = {}
        left = list(shape)
        for axis in self.order:
            made[axis] = self._axis(axis, letters, left)
        return made

    def _axis(self, axis: str, letters: str, left: list[int]) -> AxisType:
        theme, rng = self.themes[axis], self.rng
        if rng.random() < self.strays:
            theme = "any"
        if theme == "any":
            theme = rng.choice("RIVPSS")
            dim = rng.randrange(len(letters)) if letters else -1
        elif theme == "S":
            dim = letters.find(self.cut[axis])
        else:
            dim = -1
            if theme in "PV" and not (self.every or self.count == 1 or rng.random() < 0.3):
                theme = "R"
        if theme == "S" and dim >= 0:
            return self._shard(axis, dim, left)
        return {"R": R, "I": I, "V": V, "P": P, "S": R}[theme]

    def _shard(self, axis: str, dim: int, left: list[int]) -> AxisType:
        """Cut what outer axes have left; an uneven cut can only be the innermost."""
        total, ranks = left[dim], self.sizes[axis]
        if total < 0:
            return R
        left[dim] = -1 if total % ranks else total // ranks
        return Shard(dim, Padded(total) if total % ranks else Even(total))


def size_of_letter(rng: random.Random, sizes: Mapping[str, int]) -> int:
    """One row per rank, two, an uneven number, or any small number."""
    n = rng.choice(list(sizes.values()))
    whole = 4 if len(sizes) > 1 else n
    return rng.choice([n, n, whole, 2 * n, n + 1, 2 * n - 1, rng.randint(1, 4), 2, 3])


def draw_value(
    rng: random.Random, shape: Sequence[int], dtype: torch.dtype, domain: str = ""
) -> Tensor:
    """Small numbers whose sums are exact; `domain` is "unit", "rows:<k>" or "distinct"."""
    count = 1
    for size in shape:
        count *= size
    numbers: list[Any]
    if dtype is torch.bool:
        numbers = [rng.random() < 0.5 for _ in range(count)]
    elif domain.startswith("rows:"):
        numbers = [rng.randrange(int(domain[5:])) for _ in range(count)]
    elif domain == "unit":
        numbers = [rng.randint(1, 7) / 8 for _ in range(count)]
    elif domain == "distinct":
        numbers = rng.sample(range(-(count // 2) - 1, count + 2), count)
    else:
        numbers = [rng.randint(-3, 4) for _ in range(count)]
    return torch.tensor(numbers, dtype=dtype).reshape(list(shape))
