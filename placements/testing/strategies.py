"""Hypothesis strategies: meshes, extents, types, and tensors placed on all ranks.

They build valid values rather than filter, and shrink toward one axis of size 1,
Replicate, and shape (1,). Numbers are small integers in float64, so that sums are exact.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from hypothesis import strategies as st
from torch import Tensor

from placements.testing.draw.placed import (
    CHUNKS,
    ZIGZAG,
    CutPattern,
    UnsizedShard,
    UnsizedType,
    split_ranks,
)
from placements.testing.draw.routings import routings as routings
from placements.testing.draw.whole_numbers import numbers as numbers
from placements.testing.draw.whole_numbers import seeded as seeded
from placements.types.axis import AxisType, I, Invariant, P, R, Shard, V
from placements.types.extents import Even, Extent, Folded, Padded, Ragged, ZigZag
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType

AXES = ("dp", "tp", "ep", "cp")


def _check_bounds(name: str, low: int, high: int, least: int = 0) -> None:
    if not least <= low <= high:
        raise ValueError(f"{name}: need {least} <= min <= max, got {low} and {high}")


def _check_mesh(name: str, mesh: Mesh) -> None:
    if not isinstance(cast(Any, mesh), Mesh):
        raise ValueError(
            f"{name}(mesh={mesh!r}): need a placements.Mesh, as meshes() draws"
        )


@st.composite
def meshes(
    draw: st.DrawFn,
    *,
    min_axes: int = 1,
    max_axes: int = 2,
    max_size: int = 4,
    max_ranks: int = 8,
) -> Mesh:
    """Draw meshes of sizes alone, with axes named dp, tp, ep, cp."""
    _check_bounds("meshes(axes)", min_axes, max_axes, 1)
    _check_bounds("meshes(size)", 1, max_size, 1)
    _check_bounds("meshes(ranks)", 1, max_ranks, 1)
    if max_axes > len(AXES):
        raise ValueError(f"meshes(max_axes={max_axes}): at most {len(AXES)}")
    left = max_ranks
    sizes: dict[str, int] = {}
    for axis in AXES[: draw(st.integers(min_axes, max_axes))]:
        sizes[axis] = draw(st.integers(1, min(max_size, left)))
        left //= sizes[axis]
    return Mesh(sizes)


def shapes(
    *, min_dims: int = 0, max_dims: int = 3, min_size: int = 0, max_size: int = 5
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes; (1,) is the simplest."""
    _check_bounds("shapes(dims)", min_dims, max_dims)
    _check_bounds("shapes(size)", min_size, max_size)
    sizes = _simplest_first(range(min_size, max_size + 1), 1)
    dims = _simplest_first(range(min_dims, max_dims + 1), 1)
    return dims.flatmap(lambda n: st.tuples(*[sizes] * n))


def _simplest_first(values: Sequence[int], simplest: int) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(values, key=lambda v: (v != simplest, v)))


@st.composite
def extents(draw: st.DrawFn, *, total: int, ranks: int) -> Extent:
    """Draw all ways to cut `total` rows over `ranks` ranks, bound to them."""
    _check_bounds("extents(total)", 0, total)
    _check_bounds("extents(ranks)", 1, ranks, 1)
    kinds: list[Callable[[], Extent]] = [lambda: Padded(total).over(ranks)]
    if total % ranks == 0:
        kinds.insert(0, lambda: Even(total).over(ranks))
    kinds.append(lambda: Ragged(*draw(_sizes(total, ranks))).over(ranks))
    if ranks > 1 and total and total % (2 * ranks) == 0:  # seldom, so it counts twice
        kinds += [lambda: ZigZag(total).over(ranks)] * 2
    outers = [k for k in range(2, total + 1) if total % k == 0]
    if outers:
        kinds.append(lambda: draw(_folded(total, ranks, outers)))
    return draw(st.sampled_from(kinds))()


@st.composite
def _folded(draw: st.DrawFn, total: int, ranks: int, outers: Sequence[int]) -> Extent:
    outer = draw(st.sampled_from(outers))
    return Folded(outer, draw(extents(total=total // outer, ranks=ranks))).over(ranks)


@st.composite
def _sizes(draw: st.DrawFn, total: int, ranks: int) -> list[int]:
    ends = sorted(
        draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1))
    )
    return [b - a for a, b in zip([0, *ends], [*ends, total], strict=True)]


def axis_types(*, ndim: int) -> st.SearchStrategy[AxisType]:
    """Draw R, I, V, P, or a Shard (without an extent) of one of `ndim` dims."""
    _check_bounds("axis_types(ndim)", 0, ndim)
    return st.sampled_from([R, I, V, P, *(Shard(d) for d in range(ndim))])


def cut_patterns(*, ranks: int) -> st.SearchStrategy[CutPattern]:
    """Draw ways to cut a dim of any size, like torch.chunk most of the time."""
    _check_bounds("cut_patterns(ranks)", 1, ranks, 1)
    weights = st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks).map(tuple)
    return st.one_of(
        st.just(CHUNKS),
        weights.map(lambda w: CutPattern(w)),
        st.sampled_from(
            [CutPattern((), 2), CutPattern((), 3), ZIGZAG, CutPattern((), 2, True)]
        ),
    )


@st.composite
def unsized_types(
    draw: st.DrawFn,
    *,
    mesh: Mesh,
    ndim: int,
    letters: str = "RSPVI",
    likely: dict[str, AxisType | UnsizedShard] | None = None,
) -> UnsizedType:
    """Draw what a tensor of `ndim` dims is on each axis of `mesh`, cuts in any order.

    `likely`: the same for all operands of an op, so that they often fit together.
    """
    _check_mesh("layouts", mesh)
    _check_bounds("unsized_types(ndim)", 0, ndim)
    if not letters or set(letters) - set("RSPVI") or (letters == "S" and not ndim):
        raise ValueError(
            f"unsized_types(letters={letters!r}, ndim={ndim}): some of RSPVI, and of one "
            "number not S alone"
        )
    axes: dict[str, AxisType | UnsizedShard] = {}
    single: dict[str, AxisType] = {"R": R, "I": I, "V": V, "P": P}
    for axis in mesh.axes:
        guess = (likely or {}).get(axis)
        pattern = guess.pattern if isinstance(guess, UnsizedShard) else CHUNKS
        if "S" in letters and draw(st.integers(0, 7)) == 7:  # operands cut in other ways
            pattern = draw(cut_patterns(ranks=mesh.sizes[axis]))
        free: list[AxisType | UnsizedShard] = [single[x] for x in letters if x != "S"]
        cuts = [UnsizedShard(d, pattern) for d in range(ndim)] if "S" in letters else []
        free += cuts
        fitting = [R, guess] if guess else free
        if isinstance(guess, Invariant):
            fitting = [guess]
        if isinstance(guess, UnsizedShard):
            fitting = [R, *([cuts[guess.dim]] * 2 if cuts else []), *cuts]
        options = [t for t in fitting if t in free] or free
        # Now and then anything at all: refusals matter too.
        axes[axis] = draw(st.sampled_from(options * 3 + free))
    if len(axes) > 1 and draw(st.booleans()):
        axes = dict(reversed(axes.items()))
    return UnsizedType(axes)


@st.composite
def likely_types(draw: st.DrawFn, *, mesh: Mesh) -> dict[str, AxisType | UnsizedShard]:
    """Draw for each axis a type that many operands of one op should have."""
    _check_mesh("likely_types", mesh)
    likely: dict[str, AxisType | UnsizedShard] = {}
    if len(mesh.axes) > 1 and draw(st.integers(0, 7)) == 7:  # several cuts of one dim
        return dict.fromkeys(mesh.axes, UnsizedShard(draw(st.sampled_from([0, -1]))))
    for axis in mesh.axes:
        pattern = draw(cut_patterns(ranks=mesh.sizes[axis]))
        cuts = [
            UnsizedShard(0, pattern),
            UnsizedShard(-1, pattern),
        ]  # rows stand first, features last
        likely[axis] = draw(st.sampled_from([R, *cuts, P, V, I]))
    return likely


@dataclass(frozen=True)
class PlacedTensor:
    """A global value (one for each place on Varying axes), and what every rank holds."""

    mesh: Mesh
    shape: tuple[int, ...]
    layout: UnsizedType
    types: Sequence[TensorType]
    locals: Sequence[Tensor]

    def __repr__(self) -> str:
        return (
            f"PlacedTensor({self.mesh!r}, shape={self.shape}, {dict(self.layout.axes)}, "
            f"locals={list(self.locals)})"
        )


def seeds() -> st.SearchStrategy[int]:
    return st.integers(0, 2**16)


@st.composite
def placed_tensors(
    draw: st.DrawFn,
    *,
    mesh: Mesh,
    shape: tuple[int, ...] | None = None,
    letters: str = "RSPVI",
    dtype: torch.dtype = torch.float64,
) -> PlacedTensor:
    """Draw a tensor on all ranks of `mesh`."""
    _check_mesh("placed_tensors", mesh)
    if shape is None:
        shape = draw(shapes())
    for size in shape:
        _check_bounds("placed_tensors(shape)", 0, size)
    layout = draw(unsized_types(mesh=mesh, ndim=len(shape), letters=letters))
    generator = seeded(draw(seeds()))
    types = layout.types(mesh, shape)
    held = split_ranks(lambda _: numbers(shape, generator, dtype), types, mesh, generator)
    return PlacedTensor(mesh, shape, layout, types, held)
