"""Calls with operands on all ranks of a mesh: what the laws about ops draw.

An index may count each rank's own rows of a cut dim; then its values are drawn by rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from placements.testing.cases import Given, OpCall, calls
from placements.testing.draw.placed import Place, on_axes, places, split_ranks
from placements.testing.strategies import (
    likely_types,
    meshes,
    numbers,
    seeded,
    seeds,
    unsized_types,
)
from placements.types.index import Index
from placements.types.mesh import Mesh
from placements.types.tensor import TensorType


class InvalidCallError(Exception):
    """The drawn values do not go with the drawn shapes; nothing was learned."""


@dataclass(frozen=True)
class PlacedCall:
    """A call, and what every rank holds of its operands."""

    call: OpCall
    mesh: Mesh
    types: Sequence[Sequence[TensorType]]  # by operand, by rank
    seed: int
    special: bool  # whether a NaN and an infinity are among the values
    shared: tuple[str, ...]  # axes on which the ranks' random generators are alike

    def __repr__(self) -> str:
        operands = ", ".join(
            f"x{k}: {str(given.dtype)[6:]}{list(given.shape)}{types[0]!r}"
            + (f" {types[0].index!r}" if types[0].index else "")
            for k, (given, types) in enumerate(
                zip(self.call.operands, self.types, strict=True)
            )
        )
        return f"{self.call.text} where {operands} on {self.mesh!r}, seed {self.seed}"

    def locals(self) -> list[list[Tensor]]:
        """Return what ranks hold, by operand and by rank."""
        return [self._held(k) for k in range(len(self.call.operands))]

    def _held(self, k: int) -> list[Tensor]:
        given, types = self.call.operands[k], self.types[k]
        index = types[0].index
        if isinstance(index, Index) and index.cuts:
            return self._own_rows(given, types)
        generator = seeded(self.seed, k)

        def value(place: Place) -> Tensor:
            drawn = _global_value(given, self.call, generator)
            if self.special and given.dtype.is_floating_point and drawn.numel() > 1:
                drawn.view(-1)[0] = float("inf")
                drawn.view(-1)[-1] = float("nan")
            return drawn

        return split_ranks(value, types, self.mesh, generator)

    def _own_rows(self, given: Given, types: Sequence[TensorType]) -> list[Tensor]:
        """Return an index of each rank's own rows: drawn by rank."""
        assert given.rows_of is not None
        target, dim = given.rows_of
        apart = [axis for axis, t in types[0].items() if t.letter in "VS"]
        blank = torch.zeros(given.shape, dtype=given.dtype)
        shapes = split_ranks(lambda _: blank, types, self.mesh, seeded(0))
        held: list[Tensor] = []
        for r, place in enumerate(places(self.mesh)):
            cuts = self.types[target][r].cuts(dim)
            axis, extent = cuts[-1]
            rows = extent.local_size(self.types[target][r].mesh.place[axis])
            generator = seeded(self.seed, "rows", on_axes(self.mesh, place, apart))
            shape = tuple(shapes[r].shape)
            held.append(_rows(shape, rows, given, generator))
        return held


def _global_value(given: Given, call: OpCall, generator: torch.Generator) -> Tensor:
    if given.rows_of is not None:
        target, dim = given.rows_of
        return _rows(given.shape, call.operands[target].shape[dim], given, generator)
    if given.ends is not None:
        ends = torch.randint(0, given.ends + 1, given.shape, generator=generator)
        ends = ends.sort().values
        ends[-1:] = given.ends
        return ends.to(given.dtype)
    if given.below is not None:
        return torch.randint(0, given.below, given.shape, generator=generator).to(
            given.dtype
        )
    drawn = numbers(given.shape, generator, given.dtype)
    return drawn.abs() + 1 if given.positive else drawn


def _rows(
    shape: tuple[int, ...], rows: int, given: Given, generator: torch.Generator
) -> Tensor:
    numel = torch.Size(shape).numel()
    if numel and not rows:
        raise InvalidCallError("an index into no rows")
    if not given.unique:
        return torch.randint(0, max(rows, 1), shape, generator=generator)
    if shape and shape[given.along] > rows:
        raise InvalidCallError("more different rows than there are")
    order = torch.rand(
        (*shape[: given.along], rows, *shape[given.along + 1 :]), generator=generator
    )
    return order.argsort(given.along).narrow(given.along, 0, shape[given.along]).clone()


@st.composite
def placed_calls(draw: st.DrawFn, *, name: str) -> PlacedCall:
    """Draw calls of one op with operands on all ranks of a mesh."""
    call = draw(calls(name=name))
    mesh = draw(meshes())
    likely = draw(likely_types(mesh=mesh))
    types: list[list[TensorType]] = []
    for given in call.operands:
        layout = draw(
            unsized_types(
                mesh=mesh, ndim=len(given.shape), letters=given.letters, likely=likely
            )
        )
        types.append(layout.types(mesh, given.shape))
    for k, given in enumerate(call.operands):
        if given.counts is not None and draw(st.booleans()):
            types[k] = [t.with_index(Index(given.counts)) for t in types[k]]
        if given.rows_of is not None:
            types[k] = draw(_with_domain(call, given, types[k], types[given.rows_of[0]]))
    shared = tuple(axis for axis in mesh.axes if call.drawn and draw(st.booleans()))
    # An infinity times the parts of a sum is not the sum of the products.
    sums = any(t.letter == "P" for one in types for t in one[0].types)
    special = not sums and draw(st.integers(0, 9)) == 9
    return PlacedCall(call, mesh, types, draw(seeds()), special, shared)


@st.composite
def _with_domain(
    draw: st.DrawFn,
    call: OpCall,
    given: Given,
    types: Sequence[TensorType],
    target: Sequence[TensorType],
) -> list[TensorType]:
    """Draw the index's types with the domain that fits, or now and then with none."""
    assert given.rows_of is not None
    k, dim = given.rows_of
    whole = Index(call.operands[k].shape[dim])
    form = draw(st.sampled_from(["fits", "fits", "fits", "none", "whole"]))
    if form == "none":
        return list(types)
    if form == "whole" or not target[0].cuts(dim):
        return [t.with_index(whole) for t in types]
    return [
        t.with_index(Index.of_cuts(its.cuts(dim)))
        for t, its in zip(types, target, strict=True)
    ]
